/* Sixteen fp32 values at once, on AVX-512 as one register and on AVX2 as two; included by linear.c.
 *
 * Both sides define the types `vec` (fp32), `ivec` (32-bit integers) and the functions below, which do the same on every lane.
 * A `lane_set` has a bit a lane. Where memory is read or written, it switches on the first lanes and no others, and nothing
 * behind them is touched; lanes that are switched off read as zero.
 */
typedef uint16_t lane_set;

static inline lane_set first_lanes(long count) {
    return count >= 16 ? (lane_set)0xffff : count > 0 ? (lane_set)((1u << count) - 1) : (lane_set)0;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "lanes_avx2.h"
#else
#error "these kernels need AVX-512, or AVX2 with FMA"
#endif

static inline void store_bf16(uint16_t *out, vec low, vec high, long count) {
    put_bf16(out, low, first_lanes(count));
    if (count > 16) put_bf16(out + 16, high, first_lanes(count - 16));
}

static inline void store_fp32(float *out, vec low, vec high, long count) {
    put_fp32(out, low, first_lanes(count));
    if (count > 16) put_fp32(out + 16, high, first_lanes(count - 16));
}

/* Up to STEP values of a row as fp32, zeros behind them. */
static inline void widen_bf16(float *to, const uint16_t *from, long count) { put(to, take_bf16(from, first_lanes(count))); }

static inline void widen_fp32(float *to, const float *from, long count) { put(to, take_fp32(from, first_lanes(count))); }

static inline void load_fp32(const float *w, vec *first, vec *second) {
    *first = get(w);
    *second = get(w + 16);
}

static inline void prefetch_first(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += LINE) _mm_prefetch(from + i, _MM_HINT_T0);
}

static inline void prefetch_second(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += LINE) _mm_prefetch(from + i, _MM_HINT_T1);
}

/* exp by range reduction and a polynomial, to about one unit in the last place; the same on every element. NaN passes
 * through: minimum and maximum give their second operand then. */
static inline vec exp_lanes(vec x) {
    x = minimum(all(88.0f), maximum(all(-87.0f), x));
    vec n = nearest(multiply(x, all(1.44269504f)));
    vec r = negated_multiply_add(n, all(0.693359375f), x);
    r = negated_multiply_add(n, all(-2.12194440e-4f), r);
    vec p = all(1.9875691500e-4f);
    p = multiply_add(p, r, all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(p, multiply(r, r), add(r, all(1.0f)));
    return times_power_of_two(p, n);
}

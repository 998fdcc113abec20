/* Row-independent matrix product for a few rows on AVX-512: out[m][n] = sum_k x[m][k] * w[n][k].
 *
 * Every output element is one chain of fused multiply-adds in fp32 over k = 0, 1, ..., whatever the number of rows, so a
 * row's result never depends on the rows beside it. Weights are read once, in panels of 32 outputs: for each k one 64-byte
 * vector (bf16) or two (fp32). A bf16 vector holds output i in the low and output 16 + i in the high half of lane i, so
 * that a shift and a mask widen it to fp32. fp32 multiply-add has twice the throughput of the bf16 dot product on the
 * CPUs without AMX that we measured, and with up to a dozen rows the product still costs little more than reading weights.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32
#define MAX_ROWS 12 /* two accumulators a row: 24 of the 32 vector registers */
#define MAX_GROUPS 16
#define STEP 16     /* k values of a row that lie side by side */
#define LINE 64

/* Cache lines to prefetch ahead of use: into the first cache, and into the second, far enough for memory to answer. */
#define NEAR 16
#define FAR 128

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "this kernel needs AVX-512"
#endif

static inline __m256i narrow(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline __mmask32 first_lanes(long count) { return count >= 32 ? 0xffffffffu : ((__mmask32)1 << count) - 1; }

static inline void store_bf16(uint16_t *out, __m512 low, __m512 high, __mmask32 lanes) {
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
    _mm512_mask_storeu_epi16(out, lanes, both);
}

static inline void store_fp32(float *out, __m512 low, __m512 high, __mmask32 lanes) {
    _mm512_mask_storeu_ps(out, (__mmask16)lanes, low);
    _mm512_mask_storeu_ps(out + 16, (__mmask16)(lanes >> 16), high);
}

static inline __m512 take_bf16(const uint16_t *from, __mmask16 lanes) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline __m512 take_fp32(const float *from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }

/* Up to STEP values of a row as fp32, zeros behind them. */
static inline void widen_bf16(float *to, const uint16_t *from, long count) {
    _mm512_store_ps(to, take_bf16(from, (__mmask16)first_lanes(count)));
}

static inline void widen_fp32(float *to, const float *from, long count) {
    _mm512_store_ps(to, take_fp32(from, (__mmask16)first_lanes(count)));
}

static inline void load_bf16(const uint16_t *w, __m512 *first, __m512 *second) {
    __m512i both = _mm512_loadu_si512(w);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
}

static inline void load_fp32(const float *w, __m512 *first, __m512 *second) {
    *first = _mm512_loadu_ps(w);
    *second = _mm512_loadu_ps(w + 16);
}

static inline void prefetch_first(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += LINE) _mm_prefetch(from + i, _MM_HINT_T0);
}

static inline void prefetch_second(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += LINE) _mm_prefetch(from + i, _MM_HINT_T1);
}

/* One panel times ROWS rows. x is [depth / STEP][ROWS][STEP]. From `ahead` on, `share` bytes a step are prefetched: what
 * these rows contribute to fetching the next panel while they compute on this one. */
#define DEFINE_PANEL(ROWS, NAME, TYPE, LOAD, OUT, STORE)                                                               \
    static void NAME##_panel_##ROWS(const TYPE *w, const float *x, long depth, OUT *out, long stride, long width,      \
                                    const char *ahead, long share) {                                                   \
        enum { BYTES = PANEL * sizeof(TYPE) };                                                                         \
        __m512 low[ROWS], high[ROWS], first, second;                                                                   \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) low[m] = high[m] = _mm512_setzero_ps();                \
        for (long base = 0; base < depth; base += STEP, x += ROWS * STEP, ahead += share) {                            \
            long count = depth - base < STEP ? depth - base : STEP;                                                    \
            prefetch_second(ahead, share);                                                                             \
            _Pragma("GCC unroll 1") for (long k = 0; k < count; k++, w += PANEL) {                                     \
                LOAD(w, &first, &second);                                                                              \
                prefetch_first((const char *)w + NEAR * LINE, BYTES);                                                  \
                prefetch_second((const char *)w + FAR * LINE, BYTES);                                                  \
                _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) {                                              \
                    __m512 value = _mm512_set1_ps(x[m * STEP + k]);                                                    \
                    low[m] = _mm512_fmadd_ps(value, first, low[m]);                                                    \
                    high[m] = _mm512_fmadd_ps(value, second, high[m]);                                                 \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        __mmask32 lanes = first_lanes(width);                                                                          \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) STORE(out + m * stride, low[m], high[m], lanes);       \
    }

#define FOR_ALL_ROWS(USE, ...)                                                                                         \
    USE(1, __VA_ARGS__) USE(2, __VA_ARGS__) USE(3, __VA_ARGS__) USE(4, __VA_ARGS__) USE(5, __VA_ARGS__)                \
    USE(6, __VA_ARGS__) USE(7, __VA_ARGS__) USE(8, __VA_ARGS__) USE(9, __VA_ARGS__) USE(10, __VA_ARGS__)               \
    USE(11, __VA_ARGS__) USE(12, __VA_ARGS__)
#define POINTER(ROWS, NAME) NAME##_panel_##ROWS,

#include "pool.h"

/* Rows are split into groups of nearly equal size. */
typedef struct {
    long num_groups, small, num_larger;
} split;

static split split_rows(long rows) {
    long num_groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return (split){num_groups, rows / num_groups, rows % num_groups};
}

static inline long group_size(split groups, long index) { return groups.small + (index < groups.num_larger); }

static inline long num_steps(long depth) { return (depth + STEP - 1) / STEP; }

/* Memory for `rows` rows of a depth in the order the panels read them. */
static float *room_for(long rows, long depth) {
    return aligned_alloc(LINE, (size_t)(rows * num_steps(depth) * STEP) * sizeof(float));
}

/* NAME: out [rows][stride] = x [rows][depth] times packed weights, panels of PANEL outputs; at least one row. x is brought
 * into `arranged`, from `room_for`: each group as [depth / STEP][group's rows][STEP]. */
#define DEFINE_PRODUCT(NAME, TYPE, LOAD, IN, WIDEN, OUT, STORE)                                                        \
    FOR_ALL_ROWS(DEFINE_PANEL, NAME, TYPE, LOAD, OUT, STORE)                                                           \
    static void (*const NAME##_panels[])(const TYPE *, const float *, long, OUT *, long, long, const char *, long) = { \
        0, FOR_ALL_ROWS(POINTER, NAME)};                                                                               \
                                                                                                                       \
    typedef struct {                                                                                                   \
        split groups;                                                                                                  \
        const float *arranged;                                                                                         \
        const TYPE *packed;                                                                                            \
        OUT *out;                                                                                                      \
        long depth, outputs, stride;                                                                                   \
    } NAME##_job;                                                                                                      \
                                                                                                                       \
    static void NAME##_range(const void *given, long first, long stop) {                                               \
        NAME##_job job = *(const NAME##_job *)given;                                                                   \
        split groups = job.groups;                                                                                     \
        long steps = num_steps(job.depth);                                                                             \
        /* A lone group has no time to spare: it is bound by memory, and the far prefetch keeps that busy. */          \
        long lines = groups.num_groups > 1 ? (long)(STEP * PANEL * sizeof(TYPE)) / LINE : 0;                           \
        long share = (lines + groups.num_groups - 1) / groups.num_groups * LINE;                                       \
        for (long n = first * PANEL; n < stop * PANEL; n += PANEL) {                                                   \
            const TYPE *w = job.packed + n * job.depth;                                                                \
            const char *ahead = (const char *)(w + PANEL * job.depth);                                                 \
            const float *from = job.arranged;                                                                          \
            OUT *to = job.out + n;                                                                                     \
            for (long g = 0; g < groups.num_groups; g++) {                                                             \
                long size = group_size(groups, g), width = job.outputs - n;                                            \
                NAME##_panels[size](w, from, job.depth, to, job.stride, width, ahead + g * steps * share, share);      \
                from += size * steps * STEP;                                                                           \
                to += size * job.stride;                                                                               \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void NAME(const IN *x, long rows, long depth, const TYPE *packed, long outputs, OUT *out, long stride,      \
                     float *arranged) {                                                                                \
        NAME##_job job = {split_rows(rows), arranged, packed, out, depth, outputs, stride};                            \
        float *place = arranged;                                                                                       \
        for (long g = 0; g < job.groups.num_groups; g++) {                                                             \
            long size = group_size(job.groups, g);                                                                     \
            for (long k = 0; k < depth; k += STEP)                                                                     \
                for (long m = 0; m < size; m++, place += STEP) WIDEN(place, x + m * depth + k, depth - k);             \
            x += size * depth;                                                                                         \
        }                                                                                                              \
        long num_panels = (outputs + PANEL - 1) / PANEL;                                                               \
        share(NAME##_range, &job, num_panels, num_panels * PANEL * depth * (long)sizeof(TYPE));                        \
    }

DEFINE_PRODUCT(product_bf16, uint16_t, load_bf16, uint16_t, widen_bf16, uint16_t, store_bf16)
DEFINE_PRODUCT(product_wide, uint16_t, load_bf16, float, widen_fp32, float, store_fp32)
DEFINE_PRODUCT(product_fp32, float, load_fp32, float, widen_fp32, float, store_fp32)

#define DEFINE_LINEAR(KIND, TYPE)                                                                                      \
    /* out [rows][stride] = x [rows][depth] times packed weights. Returns 0, or 1 without memory. */                   \
    int jetspec_linear_##KIND(const TYPE *x, long rows, long depth, const TYPE *packed, long outputs, TYPE *out,       \
                              long stride) {                                                                           \
        if (rows < 1) return 0;                                                                                        \
        float *arranged = room_for(rows, depth);                                                                       \
        if (!arranged) return 1;                                                                                       \
        product_##KIND(x, rows, depth, packed, outputs, out, stride, arranged);                                        \
        free(arranged);                                                                                                \
        return 0;                                                                                                      \
    }

DEFINE_LINEAR(bf16, uint16_t)
DEFINE_LINEAR(fp32, float)

#define WIDEN_BF16(value) ({ uint32_t bits_ = (uint32_t)(value) << 16; float wide_; memcpy(&wide_, &bits_, 4); wide_; })
#define WIDEN_FP32(value) (value)

/* --- the halves of a decoder layer */

/* Weights of a layer; matrices are packed, vectors have the element type; a null pointer stands for a part that is absent. */
typedef struct {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *post_norm, *gate_up, *down;
    long hidden, intermediate, heads, kv_heads, dim, query_width;
    float eps;
} layer_weights;

/* exp by range reduction and a polynomial, to about one unit in the last place; the same on every element. NaN passes
 * through: minimum and maximum give their second operand then. */
static inline __m512 exp_lanes(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* to = gate * sigmoid(gate) * up; NaN passes through. */
static void silu_times(float *to, const float *gate, const float *up, long count) {
    for (long i = 0; i < count; i += 16) {
        __mmask16 lanes = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : (__mmask16)0xffff;
        __m512 g = _mm512_maskz_loadu_ps(lanes, gate + i), u = _mm512_maskz_loadu_ps(lanes, up + i);
        __m512 e = exp_lanes(_mm512_sub_ps(_mm512_setzero_ps(), g));
        __m512 s = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(to + i, lanes, _mm512_mul_ps(s, u));
    }
}

static void narrow_row_bf16(uint16_t *to, const float *from, long count) {
    for (long i = 0; i < count; i += 16) {
        __mmask16 lanes = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : (__mmask16)0xffff;
        _mm256_mask_storeu_epi16(to + i, lanes, narrow(_mm512_maskz_loadu_ps(lanes, from + i)));
    }
}

static void narrow_row_fp32(float *to, const float *from, long count) { memcpy(to, from, (size_t)count * sizeof(float)); }

#include "attention.h"

/* A layer of a stack: its weights, those for context rows, the tap it works for, and whether its output is that tap's. */
typedef struct {
    const layer_weights *whole, *context;
    long tap, is_last;
} stack_layer;

/* Rows that run through a stack. What a call does not need is null. */
typedef struct {
    long rows, first, num_taps; /* first: their row in the caches */
    const void *cos, *sin;      /* [rows][dim] */
    const row_mask *mask;
    void *taps;               /* [rows][num_taps][hidden] */
    const uint8_t *is_frozen; /* [rows]: keys and values come from `feature` */
    const void *feature;      /* [rows][hidden] */
} stack_rows;

#define TYPE uint16_t
#define ELEMENT(x) x##_bf16
#define TAKE take_bf16
#define WIDEN(value) WIDEN_BF16(value)
#define NARROW_ROW narrow_row_bf16
#define NAME(x) x##_bf16
#define PRODUCT product_wide
#define ROOM room_for
#include "layer_body.h"
#include "attention_body.h"
#include "likeliest_body.h"
#include "stack_body.h"
#undef NAME
#undef PRODUCT
#undef ROOM
#ifdef __AVX512VNNI__
#include "int8.h"
#define NAME(x) x##_bf16_int8
#define PRODUCT product_int8
#define ROOM room_for_int8
#include "layer_body.h"
#include "stack_body.h"
#undef NAME
#undef PRODUCT
#undef ROOM
#endif
#undef TYPE
#undef ELEMENT
#undef TAKE
#undef WIDEN
#undef NARROW_ROW

#define TYPE float
#define ELEMENT(x) x##_fp32
#define TAKE take_fp32
#define WIDEN(value) WIDEN_FP32(value)
#define NARROW_ROW narrow_row_fp32
#define NAME(x) x##_fp32
#define PRODUCT product_fp32
#define ROOM room_for
#include "layer_body.h"
#include "attention_body.h"
#include "likeliest_body.h"
#include "stack_body.h"
#undef NAME
#undef PRODUCT
#undef ROOM
#ifdef __AVX512VNNI__
#define NAME(x) x##_fp32_int8
#define PRODUCT product_int8
#define ROOM room_for_int8
#include "layer_body.h"
#include "stack_body.h"
#endif

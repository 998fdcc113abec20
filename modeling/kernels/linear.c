/* Row-independent matrix product for a few rows on AVX-512: out[m][n] = sum_k x[m][k] * w[n][k].
 *
 * Every output element is one chain of fused multiply-adds in fp32 over k = 0, 1, ..., whatever the number of rows, so a
 * row's result never depends on the rows beside it. Weights are read once, in panels of 32 outputs: for each k one 64-byte
 * vector (bf16) or two (fp32). A bf16 vector holds output i in the low and output 16 + i in the high half of lane i, so
 * that a shift and a mask widen it to fp32. fp32 multiply-add has twice the throughput of the bf16 dot product on the
 * CPUs without AMX that we measured, and with up to a dozen rows the product still costs little more than reading weights.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32
#define MAX_ROWS 12
#define AHEAD 24 /* vectors to prefetch ahead of use */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
int jetspec_supported(void) { return 1; }
#else
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

static void store_bf16(uint16_t *out, __m512 low, __m512 high, long width) {
    uint16_t lanes[PANEL];
    _mm256_storeu_si256((__m256i *)lanes, narrow(low));
    _mm256_storeu_si256((__m256i *)(lanes + 16), narrow(high));
    memcpy(out, lanes, (size_t)width * sizeof(uint16_t));
}

static void store_fp32(float *out, __m512 low, __m512 high, long width) {
    float lanes[PANEL];
    _mm512_storeu_ps(lanes, low);
    _mm512_storeu_ps(lanes + 16, high);
    memcpy(out, lanes, (size_t)width * sizeof(float));
}

/* One panel times ROWS rows. x is [k][ROWS]. */
#define DEFINE_PANEL(ROWS)                                                                                             \
    static void panel_bf16_##ROWS(const uint16_t *w, const float *x, long depth, uint16_t *out, long stride, long width) { \
        __m512 low[ROWS], high[ROWS];                                                                                  \
        const __m512i mask = _mm512_set1_epi32((int)0xffff0000u);                                                      \
        for (int m = 0; m < ROWS; m++) low[m] = high[m] = _mm512_setzero_ps();                                         \
        for (long k = 0; k < depth; k++) {                                                                             \
            __m512i both = _mm512_loadu_si512(w + k * PANEL);                                                          \
            _mm_prefetch((const char *)(w + (k + AHEAD) * PANEL), _MM_HINT_T0);                                        \
            __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));                                           \
            __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, mask));                                         \
            _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) {                                                  \
                __m512 value = _mm512_set1_ps(x[k * ROWS + m]);                                                        \
                low[m] = _mm512_fmadd_ps(value, first, low[m]);                                                        \
                high[m] = _mm512_fmadd_ps(value, second, high[m]);                                                     \
            }                                                                                                          \
        }                                                                                                              \
        for (int m = 0; m < ROWS; m++) store_bf16(out + m * stride, low[m], high[m], width);                           \
    }                                                                                                                  \
    static void panel_fp32_##ROWS(const float *w, const float *x, long depth, float *out, long stride, long width) {   \
        __m512 low[ROWS], high[ROWS];                                                                                  \
        for (int m = 0; m < ROWS; m++) low[m] = high[m] = _mm512_setzero_ps();                                         \
        for (long k = 0; k < depth; k++) {                                                                             \
            __m512 first = _mm512_loadu_ps(w + k * PANEL);                                                             \
            __m512 second = _mm512_loadu_ps(w + k * PANEL + 16);                                                       \
            _mm_prefetch((const char *)(w + (k + AHEAD / 2) * PANEL), _MM_HINT_T0);                                    \
            _mm_prefetch((const char *)(w + (k + AHEAD / 2) * PANEL + 16), _MM_HINT_T0);                               \
            _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) {                                                  \
                __m512 value = _mm512_set1_ps(x[k * ROWS + m]);                                                        \
                low[m] = _mm512_fmadd_ps(value, first, low[m]);                                                        \
                high[m] = _mm512_fmadd_ps(value, second, high[m]);                                                     \
            }                                                                                                          \
        }                                                                                                              \
        for (int m = 0; m < ROWS; m++) store_fp32(out + m * stride, low[m], high[m], width);                           \
    }

#define FOR_ALL_ROWS(USE) USE(1) USE(2) USE(3) USE(4) USE(5) USE(6) USE(7) USE(8) USE(9) USE(10) USE(11) USE(12)
FOR_ALL_ROWS(DEFINE_PANEL)

typedef void (*panel_bf16_function)(const uint16_t *, const float *, long, uint16_t *, long, long);
typedef void (*panel_fp32_function)(const float *, const float *, long, float *, long, long);
#define NAME_BF16(ROWS) panel_bf16_##ROWS,
#define NAME_FP32(ROWS) panel_fp32_##ROWS,
static const panel_bf16_function panel_bf16[] = {0, FOR_ALL_ROWS(NAME_BF16)};
static const panel_fp32_function panel_fp32[] = {0, FOR_ALL_ROWS(NAME_FP32)};

/* Rows are split into groups of nearly equal size, each transposed to [k][rows] once. */
typedef struct {
    long first, count;
} group;

static long split(long rows, group *groups) {
    long num = (rows + MAX_ROWS - 1) / MAX_ROWS, first = 0;
    for (long g = 0; g < num; g++) {
        long count = rows / num + (g < rows % num);
        groups[g] = (group){first, count};
        first += count;
    }
    return num;
}

#define WIDEN_BF16(value) ({ uint32_t bits_ = (uint32_t)(value) << 16; float wide_; memcpy(&wide_, &bits_, 4); wide_; })
#define WIDEN_FP32(value) (value)

#define DEFINE_LINEAR(NAME, TYPE, WIDEN, PANELS)                                                                       \
    /* out [rows][out_stride], x [rows][depth], packed: panels of PANEL outputs. Returns 0, or 1 without memory. */    \
    int NAME(const TYPE *x, long rows, long depth, const TYPE *packed, long outputs, TYPE *out, long out_stride) {     \
        long num_groups = (rows + MAX_ROWS - 1) / MAX_ROWS;                                                            \
        group *groups = malloc((size_t)num_groups * sizeof(group));                                                    \
        float *turned = aligned_alloc(64, ((size_t)(rows * depth) * sizeof(float) + 63) / 64 * 64);                    \
        if (!groups || !turned) {                                                                                      \
            free(groups);                                                                                              \
            free(turned);                                                                                              \
            return 1;                                                                                                  \
        }                                                                                                              \
        split(rows, groups);                                                                                           \
        for (long g = 0; g < num_groups; g++) {                                                                        \
            float *to = turned + groups[g].first * depth;                                                              \
            for (long m = 0; m < groups[g].count; m++) {                                                               \
                const TYPE *from = x + (groups[g].first + m) * depth;                                                  \
                for (long k = 0; k < depth; k++) to[k * groups[g].count + m] = WIDEN(from[k]);                         \
            }                                                                                                          \
        }                                                                                                              \
        for (long n = 0; n < outputs; n += PANEL) {                                                                    \
            long width = outputs - n < PANEL ? outputs - n : PANEL;                                                    \
            for (long g = 0; g < num_groups; g++)                                                                      \
                PANELS[groups[g].count](packed + n * depth, turned + groups[g].first * depth, depth,                   \
                                        out + groups[g].first * out_stride + n, out_stride, width);                    \
        }                                                                                                              \
        free(groups);                                                                                                  \
        free(turned);                                                                                                  \
        return 0;                                                                                                      \
    }

DEFINE_LINEAR(jetspec_linear_bf16, uint16_t, WIDEN_BF16, panel_bf16)
DEFINE_LINEAR(jetspec_linear_fp32, float, WIDEN_FP32, panel_fp32)

/* Row-independent matrix product for a few rows: out[m][n] = sum_k x[m][k] * w[n][k].
 *
 * Every output element is one chain of fused multiply-adds in fp32 over k = 0, 1, ..., whatever the number of rows, so a
 * row's result never depends on the rows beside it. Weights are read once, in panels of 32 outputs: for each k 64 bytes
 * (bf16) or 128 (fp32). Of bf16 weights, word i holds output i in its low and output 16 + i in its high half, so that a
 * shift and a mask widen them to fp32. fp32 multiply-add has twice the throughput of the bf16 dot product on the
 * CPUs without AMX that we measured, and with up to a dozen rows the product still costs little more than reading weights.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32
#define STEP 16 /* k values of a row that lie side by side */
#define LINE 64

/* Cache lines to prefetch ahead of use: into the first cache, and into the second, far enough for memory to answer. */
#define NEAR 16
#define FAR 128

#include "lanes.h"

/* One panel times ROWS rows. x is [depth / STEP][ROWS][STEP]. From `ahead` on, `share` bytes a step are prefetched: what
 * these rows contribute to fetching the next panel while they compute on this one. */
#define DEFINE_PANEL(ROWS, NAME, TYPE, LOAD, OUT, STORE)                                                               \
    static void NAME##_panel_##ROWS(const TYPE *w, const float *x, long depth, OUT *out, long stride, long width,      \
                                    const char *ahead, long share) {                                                   \
        enum { BYTES = PANEL * sizeof(TYPE) };                                                                         \
        vec low[ROWS], high[ROWS], first, second;                                                                      \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) low[m] = high[m] = all(0);                             \
        for (long base = 0; base < depth; base += STEP, x += ROWS * STEP, ahead += share) {                            \
            long count = depth - base < STEP ? depth - base : STEP;                                                    \
            prefetch_second(ahead, share);                                                                             \
            _Pragma("GCC unroll 1") for (long k = 0; k < count; k++, w += PANEL) {                                     \
                LOAD(w, &first, &second);                                                                              \
                prefetch_first((const char *)w + NEAR * LINE, BYTES);                                                  \
                prefetch_second((const char *)w + FAR * LINE, BYTES);                                                  \
                _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) {                                              \
                    vec value = all(x[m * STEP + k]);                                                                  \
                    low[m] = multiply_add(value, first, low[m]);                                                       \
                    high[m] = multiply_add(value, second, high[m]);                                                    \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) STORE(out + m * stride, low[m], high[m], width);       \
    }

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

/* to = gate * sigmoid(gate) * up; NaN passes through. */
static void silu_times(float *to, const float *gate, const float *up, long count) {
    for (long i = 0; i < count; i += 16) {
        lane_set lanes = first_lanes(count - i);
        vec g = take_fp32(gate + i, lanes), u = take_fp32(up + i, lanes);
        vec s = divide(g, add(all(1.0f), exp_lanes(subtract(all(0), g))));
        put_fp32(to + i, multiply(s, u), lanes);
    }
}

static void narrow_row_bf16(uint16_t *to, const float *from, long count) {
    for (long i = 0; i < count; i += 16) {
        lane_set lanes = first_lanes(count - i);
        put_bf16(to + i, take_fp32(from + i, lanes), lanes);
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

/* The same product with weights of eight bits, for networks whose output may be a little off; included by linear.c.
 *
 * A weight is scale[n] * (byte - 128) with one scale an output, a row's values are eight-bit numbers with one scale for each
 * group of 64 neighbours, so that a channel far larger than the others costs its own group precision and no other. Within a
 * group products add up exactly, as integers (unsigned weights times signed values, four at a time); the groups add up in
 * fp32 in their order. So here too a row's bits do not depend on the rows beside it.
 */

#define GROUP 64 /* values of a row that share a scale */
#define QUAD 4   /* of them, neighbours that one instruction multiplies and adds */
#define GROUP_BYTES (GROUP * PANEL)

static inline long num_depth_groups(long depth) { return (depth + GROUP - 1) / GROUP; }

/* A panel of PANEL outputs: [groups][GROUP / QUAD][PANEL][QUAD] bytes, then PANEL scales. */
static inline long int8_panel_bytes(long depth) {
    return num_depth_groups(depth) * GROUP_BYTES + PANEL * (long)sizeof(float);
}

/* Rows in the order the panels read them, all as [groups][rows]: values, their scale, and minus 128 times their sum, which
 * takes the weights' offset back; and a panel's sums [rows][PANEL]. */
typedef struct {
    int8_t *values;
    float *scale, *sums;
    int32_t *start;
} int8_rows;

static int8_rows lay_out_int8(float *memory, long rows, long depth) {
    long all = rows * num_depth_groups(depth);
    int8_t *values = (int8_t *)memory;
    float *sums = (float *)(values + all * GROUP), *scale = sums + rows * PANEL;
    return (int8_rows){values, scale, sums, (int32_t *)(scale + all)};
}

static float *room_for_int8(long rows, long depth) {
    long all = rows * num_depth_groups(depth);
    long bytes = all * (GROUP + (long)(sizeof(float) + sizeof(int32_t))) + rows * PANEL * (long)sizeof(float);
    return aligned_alloc(LINE, (size_t)((bytes + LINE - 1) / LINE * LINE));
}

/* Up to GROUP values of a row, zeros behind them. A value that is not finite spoils the whole group. */
static void quantise(int8_t *to, const float *from, long count, float *scale, int32_t *start) {
    __m512 value[GROUP / 16], most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int i = 0; i < GROUP / 16; i++) {
        value[i] = take_fp32(from + 16 * i, first_lanes(count - 16 * i));
        nan |= _mm512_cmp_ps_mask(value[i], value[i], _CMP_UNORD_Q);
        most = _mm512_max_ps(most, _mm512_abs_ps(value[i]));
    }
    float largest = nan ? NAN : _mm512_reduce_max_ps(most);
    __m512 inverse = _mm512_set1_ps(largest == 0 ? 0 : 127 / largest);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < GROUP / 16; i++) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(value[i], inverse));
        sum = _mm512_add_epi32(sum, rounded);
        _mm_store_si128((__m128i *)(to + 16 * i), _mm512_cvtsepi32_epi8(rounded));
    }
    *scale = largest / 127;
    *start = -128 * _mm512_reduce_add_epi32(sum);
}

/* The intrinsic makes gcc 12 copy every sum before and after. */
#define add_quads(sum, bytes, values) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(values))

/* One group of a panel's weights times ROWS rows, added to their sums [ROWS][PANEL]. */
#define DEFINE_INT8_TILE(ROWS, NAME)                                                                                   \
    static void NAME##_##ROWS(const uint8_t *w, const int8_t *x, const float *scale, const int32_t *start,             \
                              float *sums) {                                                                           \
        __m512i low[ROWS], high[ROWS];                                                                                 \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) low[m] = high[m] = _mm512_set1_epi32(start[m]);        \
        _Pragma("GCC unroll 2") for (int k = 0; k < GROUP; k += QUAD, w += QUAD * PANEL) {                             \
            __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + LINE);                              \
            prefetch_first((const char *)w + NEAR * LINE, QUAD * PANEL);                                               \
            prefetch_second((const char *)w + FAR * LINE, QUAD * PANEL);                                               \
            _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++) {                                                  \
                int32_t four;                                                                                          \
                memcpy(&four, x + m * GROUP + k, QUAD);                                                                \
                __m512i value = _mm512_set1_epi32(four);                                                               \
                add_quads(low[m], first, value);                                                                       \
                add_quads(high[m], second, value);                                                                     \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int m = 0; m < ROWS; m++, sums += PANEL) {                                       \
            __m512 by = _mm512_set1_ps(scale[m]);                                                                      \
            _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_cvtepi32_ps(low[m]), by, _mm512_load_ps(sums)));              \
            _mm512_store_ps(sums + 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[m]), by, _mm512_load_ps(sums + 16)));   \
        }                                                                                                              \
    }
#define INT8_POINTER(ROWS, NAME) NAME##_##ROWS,

FOR_ALL_ROWS(DEFINE_INT8_TILE, int8_tile)
static void (*const int8_tiles[])(const uint8_t *, const int8_t *, const float *, const int32_t *, float *) = {
    0, FOR_ALL_ROWS(INT8_POINTER, int8_tile)};

static int8_rows arrange_int8(const float *x, long rows, long depth, float *memory) {
    int8_rows arranged = lay_out_int8(memory, rows, depth);
    for (long g = 0, i = 0; g < num_depth_groups(depth); g++)
        for (long m = 0; m < rows; m++, i++)
            quantise(arranged.values + i * GROUP, x + m * depth + g * GROUP, depth - g * GROUP, arranged.scale + i,
                     arranged.start + i);
    return arranged;
}

/* A panel's sums over all groups, for all rows; the weights' scales are still missing. */
static void sum_panel(const uint8_t *panel, const int8_rows *rows, long num_rows, long depth_groups) {
    split groups = split_rows(num_rows);
    memset(rows->sums, 0, (size_t)(num_rows * PANEL) * sizeof(float));
    for (long g = 0; g < depth_groups; g++, panel += GROUP_BYTES)
        for (long r = 0, m = 0; r < groups.num_groups; m += group_size(groups, r++)) {
            long i = g * num_rows + m;
            int8_tiles[group_size(groups, r)](panel, rows->values + i * GROUP, rows->scale + i, rows->start + i,
                                              rows->sums + m * PANEL);
        }
}

/* NAME: out [rows][stride] = x [rows][depth] times packed weights; at least one row. `memory` comes from `room_for_int8`. */
#define DEFINE_INT8_PRODUCT(NAME, OUT, STORE)                                                                          \
    static void NAME(const float *x, long rows, long depth, const void *packed, long outputs, OUT *out, long stride,   \
                     float *memory) {                                                                                  \
        int8_rows arranged = arrange_int8(x, rows, depth, memory);                                                     \
        long depth_groups = num_depth_groups(depth), bytes = int8_panel_bytes(depth);                                  \
        for (long n = 0; n < outputs; n += PANEL) {                                                                    \
            const uint8_t *panel = (const uint8_t *)packed + n / PANEL * bytes;                                        \
            sum_panel(panel, &arranged, rows, depth_groups);                                                           \
            const float *scale = (const float *)(panel + depth_groups * GROUP_BYTES);                                  \
            __m512 low = _mm512_loadu_ps(scale), high = _mm512_loadu_ps(scale + 16);                                   \
            for (long m = 0; m < rows; m++) {                                                                          \
                const float *sum = arranged.sums + m * PANEL;                                                          \
                STORE(out + m * stride + n, _mm512_mul_ps(_mm512_load_ps(sum), low),                                   \
                      _mm512_mul_ps(_mm512_load_ps(sum + 16), high), outputs - n);                                     \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_INT8_PRODUCT(product_int8, float, store_fp32)
DEFINE_INT8_PRODUCT(product_int8_bf16, uint16_t, store_bf16)

#define DEFINE_INT8_LINEAR(KIND, TYPE, WIDEN, PRODUCT)                                                                 \
    /* out [rows][stride] = x [rows][depth] times packed weights. Returns 0, or 1 without memory. */                   \
    int jetspec_linear_##KIND##_int8(const TYPE *x, long rows, long depth, const void *packed, long outputs,           \
                                     TYPE *out, long stride) {                                                         \
        if (rows < 1) return 0;                                                                                        \
        float *memory = room_for_int8(rows, depth), *wide = room_for(rows, depth);                                     \
        int is_short = !memory || !wide;                                                                               \
        if (!is_short) {                                                                                               \
            for (long i = 0; i < rows * depth; i += STEP) WIDEN(wide + i, x + i, rows * depth - i);                    \
            PRODUCT(wide, rows, depth, packed, outputs, out, stride, memory);                                          \
        }                                                                                                              \
        free(memory), free(wide);                                                                                      \
        return is_short;                                                                                               \
    }

DEFINE_INT8_LINEAR(bf16, uint16_t, widen_bf16, product_int8_bf16)
DEFINE_INT8_LINEAR(fp32, float, widen_fp32, product_int8)

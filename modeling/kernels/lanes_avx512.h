/* What lanes.h needs, on AVX-512: a register a value, and room for two accumulators a row in 24 of the 32 registers. */
#define MAX_ROWS 12
#define MAX_GROUPS 16
#define FOR_ALL_ROWS(USE, ...)                                                                                         \
    USE(1, __VA_ARGS__) USE(2, __VA_ARGS__) USE(3, __VA_ARGS__) USE(4, __VA_ARGS__) USE(5, __VA_ARGS__)                \
    USE(6, __VA_ARGS__) USE(7, __VA_ARGS__) USE(8, __VA_ARGS__) USE(9, __VA_ARGS__) USE(10, __VA_ARGS__)               \
    USE(11, __VA_ARGS__) USE(12, __VA_ARGS__)

typedef __m512 vec;
typedef __m512i ivec;

static inline vec all(float value) { return _mm512_set1_ps(value); }
static inline vec get(const float *from) { return _mm512_loadu_ps(from); }
static inline void put(float *to, vec value) { _mm512_storeu_ps(to, value); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec subtract(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec multiply(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec divide(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec negated_multiply_add(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
static inline vec minimum(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec maximum(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec times_power_of_two(vec a, vec exponent) { return _mm512_scalef_ps(a, exponent); }

static inline vec nearest(vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* `b` in the lanes of the set, `a` in the others. */
static inline vec choose(lane_set lanes, vec a, vec b) { return _mm512_mask_mov_ps(a, lanes, b); }
static inline ivec choose_integers(lane_set lanes, ivec a, ivec b) { return _mm512_mask_mov_epi32(a, lanes, b); }
static inline lane_set where_larger(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline lane_set where_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline float largest(vec a) { return _mm512_reduce_max_ps(a); }
static inline float sum_of(vec a) { return _mm512_reduce_add_ps(a); }
static inline int smallest_integer(lane_set lanes, ivec a) { return _mm512_mask_reduce_min_epi32(lanes, a); }

/* base, base + 1, ... */
static inline ivec counted_from(int base) {
    ivec lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(lane, _mm512_set1_epi32(base));
}

static inline vec take_bf16(const uint16_t *from, lane_set lanes) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline vec take_fp32(const float *from, lane_set lanes) { return _mm512_maskz_loadu_ps(lanes, from); }

static inline void put_bf16(uint16_t *to, vec value, lane_set lanes) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

static inline void put_fp32(float *to, vec value, lane_set lanes) { _mm512_mask_storeu_ps(to, lanes, value); }

/* Thirty-two bf16 weights of a panel: the low halves of its words, and the high ones. */
static inline void load_bf16(const uint16_t *w, vec *first, vec *second) {
    __m512i both = _mm512_loadu_si512(w);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
}

/* Words with an element of each of two rows. */
static inline ivec pair_bf16(const uint16_t *low, lane_set low_lanes, const uint16_t *high, lane_set high_lanes) {
    __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low_lanes, low));
    __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high_lanes, high));
    return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
}

static inline ivec take_words(const void *from, lane_set lanes) { return _mm512_maskz_loadu_epi32(lanes, from); }
static inline void put_words(void *to, ivec words) { _mm512_storeu_si512(to, words); }

/* Which of up to 32 bytes are not zero. */
static inline uint32_t nonzero_bytes(const uint8_t *from, long count) {
    __mmask32 lanes = count >= 32 ? 0xffffffffu : ((__mmask32)1 << count) - 1;
    __m256i bytes = _mm256_maskz_loadu_epi8(lanes, from);
    return _mm256_test_epi8_mask(bytes, bytes);
}

/* Sixteen rows of sixteen words become columns, in four rounds of exchanges between rows 1, 2, 4 and 8 apart. */
static inline void transpose(ivec words[16]) {
    __m512i lane = counted_from(0);
    _Pragma("GCC unroll 4") for (int step = 1; step < 16; step *= 2) {
        __m512i apart = _mm512_set1_epi32(step);
        __mmask16 odd = _mm512_test_epi32_mask(lane, apart);
        __m512i low = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - step));
        __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, apart), odd, lane, _mm512_set1_epi32(16));
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
            if (i & step) continue;
            __m512i first = words[i], second = words[i + step];
            words[i] = _mm512_permutex2var_epi32(first, low, second);
            words[i + step] = _mm512_permutex2var_epi32(first, high, second);
        }
    }
}

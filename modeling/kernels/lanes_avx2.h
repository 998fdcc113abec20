/* What lanes.h needs, on AVX2 and FMA: two registers a value. Three rows have four accumulators each in 12 of the 16
 * registers, which is enough to keep the multiply-adds going; more rows read a panel again from the cache. */
#define MAX_ROWS 3
#define MAX_GROUPS 64
#define FOR_ALL_ROWS(USE, ...) USE(1, __VA_ARGS__) USE(2, __VA_ARGS__) USE(3, __VA_ARGS__)

typedef struct {
    __m256 a, b;
} vec;
typedef struct {
    __m256i a, b;
} ivec;

#define BOTH(OPERATION, x, y) ((vec){OPERATION((x).a, (y).a), OPERATION((x).b, (y).b)})

static inline vec all(float value) { return (vec){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline vec get(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline vec add(vec x, vec y) { return BOTH(_mm256_add_ps, x, y); }
static inline vec subtract(vec x, vec y) { return BOTH(_mm256_sub_ps, x, y); }
static inline vec multiply(vec x, vec y) { return BOTH(_mm256_mul_ps, x, y); }
static inline vec divide(vec x, vec y) { return BOTH(_mm256_div_ps, x, y); }
static inline vec minimum(vec x, vec y) { return BOTH(_mm256_min_ps, x, y); }
static inline vec maximum(vec x, vec y) { return BOTH(_mm256_max_ps, x, y); }

static inline void put(float *to, vec value) {
    _mm256_storeu_ps(to, value.a);
    _mm256_storeu_ps(to + 8, value.b);
}

static inline vec multiply_add(vec x, vec y, vec z) {
    return (vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

static inline vec negated_multiply_add(vec x, vec y, vec z) {
    return (vec){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}

static inline vec nearest(vec x) {
    enum { HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (vec){_mm256_round_ps(x.a, HOW), _mm256_round_ps(x.b, HOW)};
}

/* Exponents are whole and from -126 to 127, so that 2 to their power is a normal number. */
static inline vec times_power_of_two(vec x, vec exponent) {
    __m256i bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent.a), bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent.b), bias), 23);
    return multiply(x, (vec){_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)});
}

/* The eight lanes from `first` on as a mask of words. */
static inline __m256i spread(lane_set lanes, int first) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(lanes >> first), bit), bit);
}

/* `y` in the lanes of the set, `x` in the others. */
static inline vec choose(lane_set lanes, vec x, vec y) {
    return (vec){_mm256_blendv_ps(x.a, y.a, _mm256_castsi256_ps(spread(lanes, 0))),
                 _mm256_blendv_ps(x.b, y.b, _mm256_castsi256_ps(spread(lanes, 8)))};
}

static inline ivec choose_integers(lane_set lanes, ivec x, ivec y) {
    return (ivec){_mm256_blendv_epi8(x.a, y.a, spread(lanes, 0)), _mm256_blendv_epi8(x.b, y.b, spread(lanes, 8))};
}

static inline lane_set lanes_of(__m256 a, __m256 b) {
    return (lane_set)(_mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8);
}

static inline lane_set where_larger(vec x, vec y) {
    return lanes_of(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}

static inline lane_set where_equal(vec x, vec y) {
    return lanes_of(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}

static inline float largest(vec x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float sum_of(vec x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* The largest int where the set is empty. */
static inline int smallest_integer(lane_set lanes, ivec x) {
    int32_t words[16], least = INT32_MAX;
    _mm256_storeu_si256((__m256i *)words, x.a);
    _mm256_storeu_si256((__m256i *)(words + 8), x.b);
    for (int i = 0; i < 16; i++)
        if (lanes >> i & 1 && words[i] < least) least = words[i];
    return least;
}

/* base, base + 1, ... */
static inline ivec counted_from(int base) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (ivec){_mm256_add_epi32(lane, _mm256_set1_epi32(base)), _mm256_add_epi32(lane, _mm256_set1_epi32(base + 8))};
}

/* Halfwords as words. */
static inline ivec take_halfwords(const uint16_t *from, lane_set lanes) {
    uint16_t part[16] = {0};
    if (lanes != 0xffff) {
        memcpy(part, from, (size_t)__builtin_popcount(lanes) * sizeof(uint16_t));
        from = part;
    }
    return (ivec){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)),
                  _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8)))};
}

static inline vec take_bf16(const uint16_t *from, lane_set lanes) {
    ivec bits = take_halfwords(from, lanes);
    return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(bits.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(bits.b, 16))};
}

static inline vec take_fp32(const float *from, lane_set lanes) {
    return (vec){_mm256_maskload_ps(from, spread(lanes, 0)), _mm256_maskload_ps(from + 8, spread(lanes, 8))};
}

static inline __m256i rounded_to_bf16(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

static inline void put_bf16(uint16_t *to, vec value, lane_set lanes) {
    __m256i mixed = _mm256_packus_epi32(rounded_to_bf16(value.a), rounded_to_bf16(value.b));
    __m256i both = _mm256_permute4x64_epi64(mixed, 0xd8); /* packing works on halves of registers */
    if (lanes == 0xffff) {
        _mm256_storeu_si256((__m256i *)to, both);
    } else {
        uint16_t part[16];
        _mm256_storeu_si256((__m256i *)part, both);
        memcpy(to, part, (size_t)__builtin_popcount(lanes) * sizeof(uint16_t));
    }
}

static inline void put_fp32(float *to, vec value, lane_set lanes) {
    _mm256_maskstore_ps(to, spread(lanes, 0), value.a);
    _mm256_maskstore_ps(to + 8, spread(lanes, 8), value.b);
}

/* Thirty-two bf16 weights of a panel: the low halves of its words, and the high ones. */
static inline void load_bf16(const uint16_t *w, vec *first, vec *second) {
    __m256i a = _mm256_loadu_si256((const __m256i *)w), b = _mm256_loadu_si256((const __m256i *)(w + 16));
    __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
    *first = (vec){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    *second = (vec){_mm256_and_ps(_mm256_castsi256_ps(a), high), _mm256_and_ps(_mm256_castsi256_ps(b), high)};
}

/* Words with an element of each of two rows. */
static inline ivec pair_bf16(const uint16_t *low, lane_set low_lanes, const uint16_t *high, lane_set high_lanes) {
    ivec first = take_halfwords(low, low_lanes), second = take_halfwords(high, high_lanes);
    return (ivec){_mm256_or_si256(first.a, _mm256_slli_epi32(second.a, 16)),
                  _mm256_or_si256(first.b, _mm256_slli_epi32(second.b, 16))};
}

static inline ivec take_words(const void *from, lane_set lanes) {
    const int *words = from;
    return (ivec){_mm256_maskload_epi32(words, spread(lanes, 0)), _mm256_maskload_epi32(words + 8, spread(lanes, 8))};
}

static inline void put_words(void *to, ivec words) {
    _mm256_storeu_si256(to, words.a);
    _mm256_storeu_si256((__m256i *)to + 1, words.b);
}

/* Which of up to 32 bytes are not zero. */
static inline uint32_t nonzero_bytes(const uint8_t *from, long count) {
    uint8_t part[32] = {0};
    memcpy(part, from, (size_t)(count < 32 ? count : 32));
    __m256i is_zero = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)part), _mm256_setzero_si256());
    return ~(uint32_t)_mm256_movemask_epi8(is_zero);
}

/* Eight rows of eight words become columns. */
static inline void transpose_eight(__m256i rows[8]) {
    __m256i pair[8], four[8];
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pair[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 8; i += 4) {
        four[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
        four[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
        four[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
        four[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
    }
}

/* Sixteen rows of sixteen words become columns: four squares of eight. */
static inline void transpose(ivec words[16]) {
    __m256i square[4][8]; /* top left, top right, bottom left, bottom right */
    for (int i = 0; i < 8; i++) {
        square[0][i] = words[i].a, square[1][i] = words[i].b;
        square[2][i] = words[8 + i].a, square[3][i] = words[8 + i].b;
    }
    for (int i = 0; i < 4; i++) transpose_eight(square[i]);
    for (int i = 0; i < 8; i++) {
        words[i] = (ivec){square[0][i], square[2][i]};
        words[8 + i] = (ivec){square[1][i], square[3][i]};
    }
}

/* The likeliest token of a row of logits, for one element type; included once per type by linear.c.
 *
 * Expects TYPE, ELEMENT(x) and TAKE(from, lanes), up to sixteen elements as fp32.
 */

/* column [rows]: where the largest of `width` logits stands, the first of equals; log_p [rows]: its log-probability. NaN is
 * never the largest, and makes log_p NaN. */
void ELEMENT(jetspec_likeliest)(const TYPE *logits, long rows, long width, int64_t *column, float *log_p) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long m = 0; m < rows; m++, logits += width) {
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        __m512i place = lane;
        for (long i = 0; i < width; i += 16) {
            __mmask16 lanes = (__mmask16)first_lanes(width - i);
            __m512 value = TAKE(logits + i, lanes);
            __mmask16 larger = _mm512_mask_cmp_ps_mask(lanes, value, most, _CMP_GT_OQ);
            most = _mm512_mask_mov_ps(most, larger, value);
            place = _mm512_mask_mov_epi32(place, larger, _mm512_add_epi32(lane, _mm512_set1_epi32((int)i)));
        }
        __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        __mmask16 equal = _mm512_cmp_ps_mask(most, top, _CMP_EQ_OQ);
        for (long i = 0; i < width; i += 16) {
            __mmask16 lanes = (__mmask16)first_lanes(width - i);
            __m512 weight = exp_lanes(_mm512_sub_ps(TAKE(logits + i, lanes), top));
            sum = _mm512_mask_add_ps(sum, lanes, sum, weight);
        }
        column[m] = _mm512_mask_reduce_min_epi32(equal, place);
        log_p[m] = -logf(_mm512_reduce_add_ps(sum));
    }
}

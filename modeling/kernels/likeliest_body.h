/* The likeliest token of a row of logits, for one element type; included once per type by linear.c.
 *
 * Expects TYPE, ELEMENT(x) and TAKE(from, lanes), up to sixteen elements as fp32.
 */

/* column [rows]: where the largest of `width` logits stands, the first of equals; log_p [rows]: its log-probability. NaN is
 * never the largest, and makes log_p NaN. */
void ELEMENT(jetspec_likeliest)(const TYPE *logits, long rows, long width, int64_t *column, float *log_p) {
    for (long m = 0; m < rows; m++, logits += width) {
        vec most = all(-INFINITY), sum = all(0);
        ivec place = counted_from(0);
        for (long i = 0; i < width; i += 16) {
            lane_set lanes = first_lanes(width - i);
            vec value = TAKE(logits + i, lanes);
            lane_set larger = lanes & where_larger(value, most);
            most = choose(larger, most, value);
            place = choose_integers(larger, place, counted_from((int)i));
        }
        vec top = all(largest(most));
        lane_set equal = where_equal(most, top);
        for (long i = 0; i < width; i += 16) {
            lane_set lanes = first_lanes(width - i);
            sum = add(sum, choose(lanes, all(0), exp_lanes(subtract(TAKE(logits + i, lanes), top))));
        }
        column[m] = smallest_integer(equal, place);
        log_p[m] = -logf(sum_of(sum));
    }
}

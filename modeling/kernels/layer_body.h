/* The two halves of a decoder layer around attention, for one element type; included once per type by linear.c.
 *
 * Expects TYPE, NAME(x), WIDEN(v) -> float, NARROW_ROW(to, from, count), PRODUCT, the product of fp32 rows with packed weights
 * that gives fp32, and ROOM, the memory it needs. Inside a half everything stays fp32; rows are independent and every sum has one fixed order.
 */

static float *NAME(scratch)(long count) { return aligned_alloc(64, ((size_t)count * sizeof(float) + 63) / 64 * 64); }

static void NAME(widen_row)(float *to, const TYPE *from, long count) {
    for (long i = 0; i < count; i++) to[i] = WIDEN(from[i]);
}

/* RMS norm of a row of `count` elements, in place. Sixteen partial sums, added in one fixed order. */
static void NAME(normalise)(float *row, const TYPE *weight, long count, float eps) {
    float partial[16] = {0};
    long whole = count / 16 * 16;
    for (long i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) partial[j] += row[i + j] * row[i + j];
    float sum = 0;
    for (int j = 0; j < 16; j++) sum += partial[j];
    for (long i = whole; i < count; i++) sum += row[i] * row[i];
    float scale = 1.0f / sqrtf(sum / (float)count + eps);
    for (long i = 0; i < count; i++) row[i] = row[i] * scale * WIDEN(weight[i]);
}

/* out [rows][(heads + 2 kv_heads) * dim]: norm (unless input_norm is null), projection, head norms, RoPE on all heads but the
 * values. cos and sin [rows][dim], the first half of sin negated. Returns 0, or 1 without memory. */
int NAME(jetspec_project)(const layer_weights *w, const TYPE *hidden, long rows, const TYPE *cos, const TYPE *sin, TYPE *out) {
    long width = (w->heads + 2 * w->kv_heads) * w->dim, half = w->dim / 2;
    long first = 0;
    for (; first < rows; first += MAX_ROWS * MAX_GROUPS) {
        long count = rows - first < MAX_ROWS * MAX_GROUPS ? rows - first : MAX_ROWS * MAX_GROUPS;
        float *x = NAME(scratch)(count * w->hidden), *arranged = ROOM(count, w->hidden), *y = NAME(scratch)(count * width);
        if (!x || !arranged || !y) {
            free(x), free(arranged), free(y);
            return 1;
        }
        for (long m = 0; m < count; m++) {
            float *row = x + m * w->hidden;
            NAME(widen_row)(row, hidden + (first + m) * w->hidden, w->hidden);
            if (w->input_norm) NAME(normalise)(row, w->input_norm, w->hidden, w->eps);
        }
        PRODUCT(x, count, w->hidden, w->qkv, width, y, width, arranged);
        for (long m = 0; m < count; m++) {
            float *row = y + m * width;
            if (w->qkv_bias)
                for (long i = 0; i < width; i++) row[i] += WIDEN(((const TYPE *)w->qkv_bias)[i]);
            const TYPE *c = cos + (first + m) * w->dim, *s = sin + (first + m) * w->dim;
            for (long h = 0; h < w->heads + w->kv_heads; h++) {
                float *head = row + h * w->dim;
                const TYPE *norm = h < w->heads ? w->q_norm : w->k_norm;
                if (norm) NAME(normalise)(head, norm, w->dim, w->eps);
                for (long i = 0; i < half; i++) {
                    float a = head[i], b = head[half + i];
                    head[i] = a * WIDEN(c[i]) + b * WIDEN(s[i]);
                    head[half + i] = b * WIDEN(c[half + i]) + a * WIDEN(s[half + i]);
                }
            }
            NARROW_ROW(out + (first + m) * width, row, width);
        }
        free(x), free(arranged), free(y);
    }
    return 0;
}

/* out [rows][hidden] = h + down(silu(gate) * up), h = residual + out_projection(attended). Returns 0, or 1 without memory. */
int NAME(jetspec_finish)(const layer_weights *w, const TYPE *residual, const TYPE *attended, long rows, TYPE *out) {
    long inner = w->intermediate, query = w->query_width, widest = query > w->hidden ? query : w->hidden;
    if (inner > widest) widest = inner;
    for (long first = 0; first < rows; first += MAX_ROWS * MAX_GROUPS) {
        long count = rows - first < MAX_ROWS * MAX_GROUPS ? rows - first : MAX_ROWS * MAX_GROUPS;
        float *x = NAME(scratch)(count * widest), *arranged = ROOM(count, widest);
        float *h = NAME(scratch)(count * w->hidden), *y = NAME(scratch)(count * 2 * inner);
        if (!x || !arranged || !h || !y) {
            free(x), free(arranged), free(h), free(y);
            return 1;
        }
        for (long m = 0; m < count; m++) NAME(widen_row)(x + m * query, attended + (first + m) * query, query);
        PRODUCT(x, count, query, w->out, w->hidden, h, w->hidden, arranged);
        for (long m = 0; m < count; m++) {
            float *row = h + m * w->hidden;
            const TYPE *from = residual + (first + m) * w->hidden;
            for (long i = 0; i < w->hidden; i++) row[i] += WIDEN(from[i]);
            memcpy(x + m * w->hidden, row, (size_t)w->hidden * sizeof(float));
            NAME(normalise)(x + m * w->hidden, w->post_norm, w->hidden, w->eps);
        }
        PRODUCT(x, count, w->hidden, w->gate_up, 2 * inner, y, 2 * inner, arranged);
        for (long m = 0; m < count; m++) silu_times(x + m * inner, y + m * 2 * inner, y + m * 2 * inner + inner, inner);
        PRODUCT(x, count, inner, w->down, w->hidden, y, w->hidden, arranged);
        for (long m = 0; m < count; m++) {
            float *row = h + m * w->hidden;
            for (long i = 0; i < w->hidden; i++) row[i] += y[m * w->hidden + i];
            NARROW_ROW(out + (first + m) * w->hidden, row, w->hidden);
        }
        free(x), free(arranged), free(h), free(y);
    }
    return 0;
}

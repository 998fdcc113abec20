/* Attention of some rows against a cache, for one element type; included once per type by linear.c.
 *
 * Expects what layer_body.h expects. Query heads that share a key/value head are lanes of one product: scores are lanes times
 * keys, sums are weights times values, and both are the row-independent product of linear.c, one chain of multiply-adds
 * over the dimensions and over the keys in their order.
 */

/* Values of `count` blocks as panels [dim / 32][keys][32], zero where no row sees the key: nobody's garbage may meet a
 * weight of zero. */
static void NAME(pack_values)(TYPE *panels, const TYPE *rows, const attention_memory *memory, long count, long dim) {
    for (long b = 0; b < count; b++)
        for (long j = 0; j < PANEL; j++) {
            const TYPE *row = rows + (memory->blocks[b] * PANEL + j) * dim;
            int is_seen = memory->seen[b] >> j & 1;
            TYPE *place = panels + (b * PANEL + j) * PANEL;
            for (long d = 0; d < dim; d += PANEL, place += count * PANEL * PANEL)
                NAME(pack_value)(place, row + d, is_seen ? dim - d : 0);
        }
}

/* The rows of a mask and one key/value head with its group of query heads; query and out are those of the first row and head. */
static void NAME(attend_head)(const cache_layer *cache, long head, row_mask mask, const TYPE *query, long stride, long group,
                              TYPE *out, long out_stride, const attention_memory *memory) {
    const TYPE *keys = (const TYPE *)cache->key + head * cache->head_stride;
    const TYPE *values = (const TYPE *)cache->value + head * cache->head_stride;
    long dim = cache->dim, blocks = num_blocks(mask.num_keys), lanes = mask.rows * group, count = 0;
    TYPE *panels = memory->panels;
    for (long b = 0; b < blocks; b++) {
        uint32_t seen = 0;
        for (long m = 0; m < mask.rows; m++) seen |= mask.bits[m * blocks + b];
        if (!seen) continue;
        memory->seen[count] = seen;
        memory->blocks[count] = (int)b;
        NAME(pack_keys)(panels + count++ * PANEL * dim, keys + b * PANEL * dim, mask.num_keys - b * PANEL, dim);
    }
    float scale = 1 / sqrtf((float)dim);
    for (long m = 0; m < mask.rows; m++) {
        float *row = memory->query + m * group * dim;
        for (long i = 0; i < group * dim; i++) row[i] = WIDEN(query[m * stride + i]) * scale;
    }
    long width = count * PANEL;
    PRODUCT(memory->query, lanes, dim, panels, width, memory->scores, width, memory->arranged);
    for (long l = 0; l < lanes; l++)
        memory->scale[l] = softmax(memory->scores + l * width, mask.bits + l / group * blocks, memory->blocks, count);
    NAME(pack_values)(panels, values, memory, count, dim);
    PRODUCT(memory->scores, lanes, width, panels, dim, memory->sums, dim, memory->arranged);
    int spoiled[MAX_LANES] = {0};
    for (long l = 0; l < lanes; l++) {
        float *sum = memory->sums + l * dim;
        int is_nan = 0;
        for (long i = 0; i < dim; i++) {
            sum[i] = sum[i] * memory->scale[l] + 0.0f; /* no zero keeps a sign */
            is_nan |= sum[i] != sum[i];
        }
        spoiled[l / group] |= is_nan;
        NARROW_ROW(out + l / group * out_stride + l % group * dim, sum, dim);
    }
    /* A value that is not finite spoils rows that give it no weight: alone, they do not meet it. */
    for (long m = 0; m < mask.rows && mask.rows > 1; m++)
        if (spoiled[m])
            NAME(attend_head)(cache, head, (row_mask){mask.bits + m * blocks, 1, mask.num_keys}, query + m * stride, stride,
                              group, out + m * out_stride, out_stride, memory);
}

/* out [rows][heads * dim]; query [rows][heads][dim], `stride` elements from row to row. Returns 0, or 1 without memory. */
int NAME(jetspec_attend)(const cache_layer *cache, const row_mask *mask, const TYPE *query, long stride, long heads, TYPE *out) {
    long group = heads / cache->kv_heads, at_once = group < MAX_LANES ? MAX_LANES / group : 1;
    long blocks = num_blocks(mask->num_keys), width = group * cache->dim;
    attention_memory memory;
    if (!make_attention_memory(&memory, cache, group * (mask->rows < at_once ? mask->rows : at_once), blocks)) return 1;
    for (long first = 0; first < mask->rows; first += at_once) {
        long rows = mask->rows - first < at_once ? mask->rows - first : at_once;
        row_mask part = {mask->bits + first * blocks, rows, mask->num_keys};
        for (long h = 0; h < cache->kv_heads; h++)
            NAME(attend_head)(cache, h, part, query + first * stride + h * width, stride, group,
                              out + first * heads * cache->dim + h * width, heads * cache->dim, &memory);
    }
    free(memory.all);
    return 0;
}

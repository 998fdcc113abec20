/* What attention needs whatever the element type: its structures, masks, softmax and memory; included by linear.c.
 *
 * Keys are taken in blocks of 32, counted from the first key of the cache. A block that no row sees is left out, and a key
 * that a row does not see adds nothing at all to that row's sums, so a row's result depends on the keys it sees alone.
 */

#define MAX_LANES 96 /* (row, head) pairs that share one pass over the keys: bounds the memory for their scores */

/* One layer of a cache: keys and values [kv_heads][positions][dim], `head_stride` elements from head to head. */
typedef struct {
    void *key, *value;
    long head_stride, kv_heads, dim, element_bytes;
} cache_layer;

/* bits [rows][blocks]: which of a block's keys a row sees. */
typedef struct {
    const uint32_t *bits;
    long rows, num_keys;
} row_mask;

static inline long num_blocks(long num_keys) { return (num_keys + PANEL - 1) / PANEL; }

/* visible [rows][num_keys] of bytes 0 or 1. */
void jetspec_pack_mask(const uint8_t *visible, long rows, long num_keys, uint32_t *bits) {
    for (long m = 0; m < rows; m++, visible += num_keys)
        for (long k = 0; k < num_keys; k += PANEL)
            *bits++ = nonzero_bytes(visible + k, num_keys - k);
}

/* Rows of keys and values [rows][kv_heads][dim], each with its stride in elements from row to row, into the cache. */
void jetspec_store(const cache_layer *cache, long first, long rows, const char *key, long key_stride, const char *value,
                   long value_stride) {
    size_t size = (size_t)(cache->dim * cache->element_bytes);
    for (long h = 0; h < cache->kv_heads; h++)
        for (long m = 0; m < rows; m++) {
            long to = (h * cache->head_stride + (first + m) * cache->dim) * cache->element_bytes;
            memcpy((char *)cache->key + to, key + m * key_stride * cache->element_bytes + (size_t)h * size, size);
            memcpy((char *)cache->value + to, value + m * value_stride * cache->element_bytes + (size_t)h * size, size);
        }
}

/* Scores of a row over `count` blocks become weights, zero where hidden; returns what divides their sum of values, or 0 when
 * the row sees nothing. `bits` are the row's, `blocks` the places of the scores' blocks in them. NaN passes through. */
static float softmax(float *scores, const uint32_t *bits, const int *blocks, long count) {
    vec most = all(-INFINITY), sum = all(0);
    for (long b = 0; b < count; b++)
        for (int half = 0; half < 2; half++) {
            lane_set seen = (lane_set)(bits[blocks[b]] >> 16 * half);
            most = choose(seen, most, maximum(most, get(scores + b * PANEL + 16 * half)));
        }
    vec top = all(largest(most));
    for (long b = 0; b < count; b++)
        for (int half = 0; half < 2; half++) {
            float *place = scores + b * PANEL + 16 * half;
            lane_set seen = (lane_set)(bits[blocks[b]] >> 16 * half);
            vec weight = choose(seen, all(0), exp_lanes(subtract(get(place), top)));
            sum = add(sum, weight);
            put(place, weight);
        }
    float total = sum_of(sum);
    return total == 0 ? 0 : 1 / total;
}

/* Memory of one call, for up to `lanes` (row, head) pairs. */
typedef struct {
    float *query, *scores, *sums, *arranged, *scale;
    uint32_t *seen;
    int *blocks;
    void *panels, *all;
} attention_memory;

static void *take(uintptr_t *from, long bytes) {
    void *taken = (void *)*from;
    *from += (uintptr_t)((bytes + LINE - 1) / LINE * LINE);
    return taken;
}

/* Lays the parts out from an address on; returns the end. */
static uintptr_t lay_out(attention_memory *memory, uintptr_t from, const cache_layer *cache, long lanes, long blocks) {
    long keys = blocks * PANEL, depth = num_steps(cache->dim) * STEP, word = sizeof(float);
    memory->query = take(&from, lanes * cache->dim * word);
    memory->scores = take(&from, lanes * keys * word);
    memory->sums = take(&from, lanes * cache->dim * word);
    memory->arranged = take(&from, lanes * (keys > depth ? keys : depth) * word);
    memory->scale = take(&from, lanes * word);
    memory->seen = take(&from, blocks * word);
    memory->blocks = take(&from, blocks * word);
    memory->panels = take(&from, keys * num_blocks(cache->dim) * PANEL * cache->element_bytes);
    return from;
}

static int make_attention_memory(attention_memory *memory, const cache_layer *cache, long lanes, long blocks) {
    memory->all = aligned_alloc(LINE, lay_out(memory, 0, cache, lanes, blocks));
    if (memory->all) lay_out(memory, (uintptr_t)memory->all, cache, lanes, blocks);
    return memory->all != NULL;
}

/* --- panels for the products, of keys and values as they lie in the cache; lanes that are switched off become zero */

/* Rows of `dim` elements, at most 32 of them, as a panel [dim][32]. */
static void pack_keys_bf16(uint16_t *panel, const uint16_t *rows, long count, long dim) {
    ivec words[16];
    for (long d = 0; d < dim; d += 16, rows += 16, panel += 16 * PANEL) {
        lane_set lanes = first_lanes(dim - d);
        for (int i = 0; i < 16; i++)
            words[i] = pair_bf16(rows + i * dim, i < count ? lanes : 0, rows + (16 + i) * dim, 16 + i < count ? lanes : 0);
        transpose(words);
        for (int j = 0; j < 16 && d + j < dim; j++) put_words(panel + j * PANEL, words[j]);
    }
}

static void pack_keys_fp32(float *panel, const float *rows, long count, long dim) {
    ivec words[16];
    for (long d = 0; d < dim; d += 16, rows += 16, panel += 16 * PANEL)
        for (long half = 0; half < PANEL; half += 16) {
            lane_set lanes = first_lanes(dim - d);
            for (long i = 0; i < 16; i++) words[i] = take_words(rows + (half + i) * dim, half + i < count ? lanes : 0);
            transpose(words);
            for (int j = 0; j < 16 && d + j < dim; j++) put_words(panel + j * PANEL + half, words[j]);
        }
}

/* `count` elements of a row, at most 32, as a row of a panel. */
static inline void pack_value_bf16(uint16_t *place, const uint16_t *row, long count) {
    put_words(place, pair_bf16(row, first_lanes(count), row + 16, first_lanes(count - 16)));
}

static inline void pack_value_fp32(float *place, const float *row, long count) {
    put(place, take_fp32(row, first_lanes(count)));
    put(place + 16, take_fp32(row + 16, first_lanes(count - 16)));
}

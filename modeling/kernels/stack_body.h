/* Several layers over packed rows in one call, for one kind of weights; included once per kind by linear.c.
 *
 * Expects what layer_body.h expects, and ELEMENT(x), the name of what depends on the element type alone. Between the layers
 * nothing returns to the caller: a few rows take so little time a layer that calls from outside would cost half as much.
 */

/* Features of the frozen rows side by side, with their rotations; what their keys and values come from. */
typedef struct {
    TYPE *feature, *cos, *sin, *heads;
    long count;
} NAME(frozen_rows);

static void NAME(gather_frozen)(NAME(frozen_rows) *frozen, const stack_rows *at, long hidden, long dim) {
    frozen->count = 0;
    for (long m = 0; m < at->rows; m++) {
        if (!at->is_frozen[m]) continue;
        long to = frozen->count++;
        memcpy(frozen->feature + to * hidden, (const TYPE *)at->feature + m * hidden, (size_t)hidden * sizeof(TYPE));
        memcpy(frozen->cos + to * dim, (const TYPE *)at->cos + m * dim, (size_t)dim * sizeof(TYPE));
        memcpy(frozen->sin + to * dim, (const TYPE *)at->sin + m * dim, (size_t)dim * sizeof(TYPE));
    }
}

/* Keys and values of frozen rows over those that the rows' tokens gave. */
static int NAME(store_frozen)(const layer_weights *w, const cache_layer *cache, const stack_rows *at,
                              const NAME(frozen_rows) *frozen) {
    long width = w->kv_heads * w->dim;
    if (NAME(jetspec_project)(w, frozen->feature, frozen->count, frozen->cos, frozen->sin, frozen->heads)) return 1;
    const TYPE *heads = frozen->heads;
    for (long m = 0; m < at->rows; m++) {
        if (!at->is_frozen[m]) continue;
        jetspec_store(cache, at->first + m, 1, (const char *)heads, 0, (const char *)(heads + width), 0);
        heads += 2 * width;
    }
    return 0;
}

static int NAME(run_layer)(const stack_layer *layer, const cache_layer *cache, const stack_rows *at,
                           const NAME(frozen_rows) *frozen, TYPE *hidden, TYPE *heads, TYPE *attended) {
    const layer_weights *w = layer->whole;
    long width = (w->heads + 2 * w->kv_heads) * w->dim;
    const TYPE *key = heads + w->heads * w->dim, *value = key + w->kv_heads * w->dim;
    if (NAME(jetspec_project)(w, hidden, at->rows, at->cos, at->sin, heads)) return 1;
    jetspec_store(cache, at->first, at->rows, (const char *)key, width, (const char *)value, width);
    if (frozen->count && NAME(store_frozen)(layer->context, cache, at, frozen)) return 1;
    if (ELEMENT(jetspec_attend)(cache, at->mask, heads, width, w->heads, attended)) return 1;
    return NAME(jetspec_finish)(w, hidden, attended, at->rows, hidden);
}

/* hidden [rows][hidden] through all layers, in place; layer i keeps its keys and values in caches[i]. Where a layer is the last
 * of its tap, its output goes to at->taps [rows][num_taps][hidden] as well. Returns 0, or 1 without memory. */
int NAME(jetspec_stack)(const stack_layer *layers, const cache_layer *caches, long num_layers, const stack_rows *at,
                        TYPE *hidden) {
    const layer_weights *w = layers->whole;
    long width = (w->heads + 2 * w->kv_heads) * w->dim, query = w->heads * w->dim;
    size_t per_row = (size_t)(width + query + w->hidden + 2 * w->dim + 2 * w->kv_heads * w->dim);
    TYPE *heads = malloc((size_t)at->rows * per_row * sizeof(TYPE)), *attended = heads + at->rows * width;
    if (!heads) return 1;
    NAME(frozen_rows) frozen = {.feature = attended + at->rows * query};
    frozen.cos = frozen.feature + at->rows * w->hidden;
    frozen.sin = frozen.cos + at->rows * w->dim;
    frozen.heads = frozen.sin + at->rows * w->dim;
    if (at->is_frozen) NAME(gather_frozen)(&frozen, at, w->hidden, w->dim);
    int is_short = 0;
    for (long i = 0; i < num_layers && !is_short; i++) {
        is_short = NAME(run_layer)(layers + i, caches + i, at, &frozen, hidden, heads, attended);
        if (!at->taps || !layers[i].is_last) continue;
        for (long m = 0; m < at->rows; m++)
            memcpy((TYPE *)at->taps + (m * at->num_taps + layers[i].tap) * w->hidden, hidden + m * w->hidden,
                   (size_t)w->hidden * sizeof(TYPE));
    }
    free(heads);
    return is_short;
}

/* Keys and values of context rows for all layers, into their caches from row at->first on. Each layer reads its own tap of
 * at->taps [rows][num_taps][hidden], or all read at->feature [rows][hidden]. Returns 0, or 1 without memory. */
int NAME(jetspec_stack_context)(const stack_layer *layers, const cache_layer *caches, long num_layers, const stack_rows *at) {
    const layer_weights *w = layers->context;
    long width = w->kv_heads * w->dim;
    TYPE *heads = malloc((size_t)(at->rows * (2 * width + w->hidden)) * sizeof(TYPE)), *own = heads + at->rows * 2 * width;
    if (!heads) return 1;
    int is_short = 0;
    for (long i = 0; i < num_layers && !is_short; i++) {
        for (long m = 0; m < at->rows && at->taps; m++)
            memcpy(own + m * w->hidden, (const TYPE *)at->taps + (m * at->num_taps + layers[i].tap) * w->hidden,
                   (size_t)w->hidden * sizeof(TYPE));
        const TYPE *from = at->taps ? own : at->feature;
        is_short = NAME(jetspec_project)(layers[i].context, from, at->rows, at->cos, at->sin, heads);
        if (is_short) break;
        jetspec_store(caches + i, at->first, at->rows, (const char *)heads, 2 * width, (const char *)(heads + width), 2 * width);
    }
    free(heads);
    return is_short;
}

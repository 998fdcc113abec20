/* Threads that share the panels of one product; included by linear.c.
 *
 * A panel's result does not depend on who computes it, so the bits are the same with any number of threads. Between the
 * products of a forward a thread spins, since sleeping and waking takes as long as a product; after a while it sleeps.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MAX_THREADS 64
#define PIECES 4              /* a thread's share of a product is cut into so many: one that is interrupted leaves the rest */
#define MIN_SHARED (128 << 10) /* bytes of weights below which sharing costs more than it gives */
#define SPINS 20000           /* about a millisecond */

/* Computes panels first..stop-1 of a job. */
typedef void (*panel_range)(const void *job, long first, long stop);

typedef struct {
    panel_range range;
    const void *job;
    long num_panels, piece;
    atomic_long next;
} shared_work;

static struct {
    pthread_mutex_t lock; /* held while threads are made or ended, and through a product that they share */
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    int num_helpers; /* threads beside the caller */
    atomic_int is_stopping, is_open, num_busy;
    atomic_uint turn; /* counts products; a change wakes the helpers */
    shared_work work;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void work_off(shared_work *work) {
    long first;
    while ((first = atomic_fetch_add(&work->next, work->piece)) < work->num_panels) {
        long stop = first + work->piece;
        work->range(work->job, first, stop < work->num_panels ? stop : work->num_panels);
    }
}

/* Wait for the turn after `turn`; returns it. */
static unsigned await_turn(unsigned turn) {
    unsigned now;
    for (int i = 0; i < SPINS; i++) {
        if ((now = atomic_load(&pool.turn)) != turn) return now;
        _mm_pause();
    }
    pthread_mutex_lock(&pool.sleep);
    while ((now = atomic_load(&pool.turn)) == turn) pthread_cond_wait(&pool.wake, &pool.sleep);
    pthread_mutex_unlock(&pool.sleep);
    return now;
}

static void next_turn(void) {
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.turn, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
}

static void *help(void *first_turn) {
    unsigned turn = (unsigned)(uintptr_t)first_turn;
    for (;;) {
        turn = await_turn(turn);
        if (atomic_load(&pool.is_stopping)) return NULL;
        atomic_fetch_add(&pool.num_busy, 1);
        if (atomic_load(&pool.is_open)) work_off(&pool.work); /* else it came too late */
        atomic_fetch_sub(&pool.num_busy, 1);
    }
}

/* Run a job's panels, shared if there are helpers, the weights are worth it, and no other thread shares a product now. */
static void share(panel_range range, const void *job, long num_panels, long weight_bytes) {
    if (weight_bytes < MIN_SHARED || pthread_mutex_trylock(&pool.lock)) {
        range(job, 0, num_panels);
        return;
    }
    if (pool.num_helpers) {
        long pieces = (pool.num_helpers + 1) * PIECES;
        pool.work.range = range, pool.work.job = job, pool.work.num_panels = num_panels;
        pool.work.piece = (num_panels + pieces - 1) / pieces;
        atomic_store(&pool.work.next, 0);
        atomic_store(&pool.is_open, 1);
        next_turn();
        work_off(&pool.work);
        atomic_store(&pool.is_open, 0); /* nobody waits for a helper that has not begun */
        for (long i = 0; atomic_load(&pool.num_busy); i++) i < SPINS ? _mm_pause() : (void)sched_yield();
    } else {
        range(job, 0, num_panels);
    }
    pthread_mutex_unlock(&pool.lock);
}

/* Let `count` threads, the caller included, share products; returns how many there are. New threads run on the cores that the
 * calling thread may use. */
int jetspec_set_threads(int count) {
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.is_stopping, 1);
    next_turn();
    while (pool.num_helpers) pthread_join(pool.threads[--pool.num_helpers], NULL);
    atomic_store(&pool.is_stopping, 0);
    unsigned turn = atomic_load(&pool.turn);
    while (pool.num_helpers + 1 < count && pool.num_helpers < MAX_THREADS) {
        if (pthread_create(&pool.threads[pool.num_helpers], NULL, help, (void *)(uintptr_t)turn)) break;
        pool.num_helpers++;
    }
    int num_threads = pool.num_helpers + 1;
    pthread_mutex_unlock(&pool.lock);
    return num_threads;
}

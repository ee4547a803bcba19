/* AdaShift's update on a CPU, one pass over memory for all parameters of a group.

   adashift/_steps/cpu.py compiles this with REAL (float or double) and BITS (the unsigned integer of
   the same size) and packs Rule and Job. adashift/_window.py explains the window. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h> /* sqrt of a float is a float */
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { PIECE = 4096 };  /* elements that fit in a core's cache */
enum { SHARE = 65536 }; /* elements per work item; fixed, so results do not depend on threads */
enum { LINE = 64 / sizeof(REAL), AHEAD = 2048 / sizeof(REAL), MOST = 256 };
enum { MAX, MEAN, NONE };

typedef struct {
    double lr, beta1, beta2, eps, total, decay, coupled, sign;
    int64_t phi, threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or NULL */
} Rule;

typedef struct {
    REAL *p;
    const REAL *g, *earlier;
    REAL *keep, *slot;
    const REAL *front;
    REAL **closing; /* slots 1 … m − 1 of a full block, to convert to suffix sums */
    REAL *v, *phi;  /* phi: φ(g_{t−n}²) before, φ(g_t²) after */
    int64_t size, closings;
    double weight;     /* of front */
    double correction; /* 1 − β2^(t−n); 0 during the first n steps */
} Job;

typedef struct {
    const Rule *rule;
    const Job *jobs;
    int64_t count, *first; /* first[i]: number of the first share of job i */
    double *part, *step;   /* of each share: max |g| or Σ g²; of each job: α / (√v̂ + ε) / total */
    atomic_llong next;
} Work;

#define INLINE static inline __attribute__((always_inline))

/* Non-temporal store: a gradient is not read again until the block is full. */
INLINE void put_line(REAL *to, const REAL *from) {
#ifdef __SSE2__
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
#else
    memcpy(to, from, 64);
#endif
}

/* One cache line or its remainder; E, K, S, F, M: whether earlier, keep, slot, front, update apply. */
INLINE void line(const Rule *r, const Job *j, int64_t a, int n, REAL *p, const REAL *g,
                 const REAL *f, REAL c, const int E, const int K, const int S, const int F,
                 const int M, const int whole) {
    REAL x[LINE], s[LINE];
    const REAL b = r->beta1, d = r->decay, w = j->weight;
    for (int l = 0; l < n; l++) x[l] = g[l];
    for (int l = 0; l < n; l++) s[l] = E ? x[l] + b * j->earlier[a + l] : x[l];
    if (K) memcpy(j->keep + a, s, n * sizeof(REAL));
    if (S && whole) put_line(j->slot + a, x);
    if (S && !whole) memcpy(j->slot + a, x, n * sizeof(REAL));
    if (M)
        for (int l = 0; l < n; l++) p[l] = d * p[l] - c * (F ? s[l] + w * f[l] : s[l]);
}

INLINE void lines(const Rule *r, const Job *j, int64_t a, int64_t n, const REAL *g, const REAL *f,
                  REAL c, const int E, const int K, const int S, const int F, const int M) {
    REAL *p = j->p + a;
    int64_t i = 0;
    if (!S || ((uintptr_t)(j->slot + a) & 15) == 0)
        for (; i + LINE <= n; i += LINE) {
            __builtin_prefetch(g + i + AHEAD);
            if (E) __builtin_prefetch(j->earlier + a + i + AHEAD, 1);
            if (F) __builtin_prefetch(f + i + AHEAD);
            if (M) __builtin_prefetch(p + i + AHEAD, 1);
            line(r, j, a + i, LINE, p + i, g + i, F ? f + i : f, c, E, K, S, F, M, 1);
        }
    for (; i < n; i += LINE)
        line(r, j, a + i, n - i < LINE ? n - i : LINE, p + i, g + i, F ? f + i : f, c, E, K, S, F, M, 0);
}

/* φ = max or mean: v is a scalar and c is its step size. */
static void move(const Rule *r, const Job *j, int64_t a, int64_t n, const REAL *g, const REAL *f,
                 REAL c) {
    const int moves = c != 0; /* true for NaN */
#define PARTS(E, K, S, F) \
    (moves ? lines(r, j, a, n, g, f, c, E, K, S, F, 1) : lines(r, j, a, n, g, f, c, E, K, S, F, 0))
    if (!j->slot) PARTS(0, 0, 0, 0);
    else if (!j->earlier) f ? PARTS(0, 0, 1, 1) : PARTS(0, 0, 1, 0);
    else if (!j->keep) f ? PARTS(1, 0, 1, 1) : PARTS(1, 0, 1, 0);
    else f ? PARTS(1, 1, 1, 1) : PARTS(1, 1, 1, 0);
#undef PARTS
}

/* φ = none: each element has its own v. */
static void move_elements(const Rule *r, const Job *j, int64_t a, int64_t n, const REAL *g,
                          const REAL *f) {
    const REAL b1 = r->beta1, b2 = r->beta2, new2 = 1 - r->beta2, w = j->weight, d = r->decay;
    const REAL lr = r->lr / r->total, eps = r->eps, unbias = 1 / j->correction;
    REAL *restrict p = j->p + a, *restrict v = j->v + a, *restrict phi = j->phi + a, m[PIECE];
    for (int64_t i = 0; i < n; i++) m[i] = g[i];
    if (j->earlier)
        for (int64_t i = 0; i < n; i++) m[i] += b1 * j->earlier[a + i];
    if (j->keep) memcpy(j->keep + a, m, n * sizeof(REAL));
    if (j->slot) memcpy(j->slot + a, g, n * sizeof(REAL));
    if (f)
        for (int64_t i = 0; i < n; i++) m[i] += w * f[i];
    for (int64_t i = 0; i < n && j->correction > 0; i++) {
        v[i] = b2 * v[i] + new2 * phi[i];
        const REAL moved = d * p[i] - lr * m[i] / (sqrt(v[i] * unbias) + eps);
        p[i] = v[i] == 0 ? p[i] : moved;
    }
    for (int64_t i = 0; i < n; i++) phi[i] = g[i] * g[i];
}

/* Converts a full block to suffix sums; returns the longest, which is not stored. */
static void close_block(const Rule *r, const Job *j, int64_t a, int64_t n, REAL *longest) {
    REAL weight[MOST];
    const int64_t last = j->closings - 1;
    double w = 1;
    for (int64_t k = last - 1; k >= 0; k--) weight[k] = w *= r->beta1;
    enum { WIDTH = 4 * LINE };
    for (int64_t i = 0; i < n; i += WIDTH) {
        const int width = n - i < WIDTH ? n - i : WIDTH;
        REAL sum[WIDTH];
        memcpy(sum, j->closing[last] + a + i, width * sizeof(REAL));
        for (int64_t k = last - 1; k >= 0; k--) {
            REAL *restrict x = j->closing[k] + a + i;
            for (int l = 0; l < WIDTH; l += LINE) __builtin_prefetch(x + AHEAD / 2 + l, 1);
            for (int l = 0; l < width; l++) sum[l] += weight[k] * x[l];
            if (k > 0) memcpy(x, sum, width * sizeof(REAL));
        }
        memcpy(longest + i, sum, width * sizeof(REAL));
    }
}

/* |x| compared as unsigned integers has the same order, with NaN above all. */
static double largest(const REAL *x, int64_t n) {
    const BITS all = ~(BITS)0 >> 1;
    BITS top = 0;
    for (int64_t i = 0; i < n; i++) {
        BITS u;
        memcpy(&u, x + i, sizeof u);
        u &= all;
        top = u > top ? u : top;
    }
    REAL found;
    memcpy(&found, &top, sizeof found);
    return found;
}

static double sum_of_squares(const REAL *x, int64_t n) {
    double sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) sum[l] += (double)x[i + l] * x[i + l];
    for (; i < n; i++) sum[0] += (double)x[i] * x[i];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

static double larger(double a, double b) { return b > a || b != b ? b : a; }

static double share(const Rule *r, const Job *j, int64_t a, int64_t end, REAL step) {
    REAL gradient[PIECE], longest[PIECE];
    double part = 0;
    for (; a < end; a += PIECE) {
        const int64_t n = end - a < PIECE ? end - a : PIECE;
        const REAL *g = j->g + a, *f = j->front ? j->front + a : NULL;
        if (r->coupled != 0 || r->sign < 0) {
            const REAL sign = r->sign, coupled = r->coupled;
            for (int64_t i = 0; i < n; i++) gradient[i] = sign * g[i] + coupled * j->p[a + i];
            g = gradient;
        }
        if (j->closings) {
            close_block(r, j, a, n, longest);
            f = longest;
        }
        if (r->phi == NONE) {
            move_elements(r, j, a, n, g, f);
            continue;
        }
        move(r, j, a, n, g, f, step);
        part = r->phi == MAX ? larger(part, largest(g, n)) : part + sum_of_squares(g, n);
    }
    return part;
}

static void take_shares(void *argument) {
    Work *w = argument;
    for (int64_t i = 0, number; (number = atomic_fetch_add(&w->next, 1)) < w->first[w->count];) {
        while (w->first[i + 1] <= number) i++;
        const Job *j = w->jobs + i;
        const int64_t a = (number - w->first[i]) * SHARE;
        w->part[number] = share(w->rule, j, a, a + SHARE < j->size ? a + SHARE : j->size, w->step[i]);
    }
}

static void *help(void *argument) { return take_shares(argument), NULL; }

/* pthreads, if torch's threads are not available. */
static void take_shares_together(Work *w, int64_t wanted) {
    pthread_t helper[MOST];
    int64_t helpers = 0;
    while (helpers < wanted - 1 && helpers < MOST &&
           !pthread_create(&helper[helpers], NULL, help, w))
        helpers++;
    take_shares(w);
    while (helpers > 0) pthread_join(helper[--helpers], NULL);
}

/* v uses g_{t−n}, never g_t; a block with v = 0 is not updated. */
static double step_size(const Rule *r, const Job *j) {
    if (r->phi == NONE || j->correction == 0) return 0;
    const double v = r->beta2 * *j->v + (1 - r->beta2) * *j->phi;
    *j->v = v;
    return v == 0 ? 0 : r->lr / (sqrt(v / j->correction) + r->eps) / r->total;
}

static void set_phi(const Work *w, int64_t i) {
    const Job *j = w->jobs + i;
    double whole = 0;
    for (int64_t k = w->first[i]; k < w->first[i + 1]; k++)
        whole = w->rule->phi == MAX ? larger(whole, w->part[k]) : whole + w->part[k];
    const REAL top = whole;
    *j->phi = w->rule->phi == MAX ? top * top : (REAL)(whole / j->size);
}

/* Returns 0, or 1 if out of memory; then nothing has changed. */
int adashift_step(const Rule *rule, const Job *jobs, int64_t count) {
    Work w = {rule, jobs, count, malloc((count + 1) * sizeof(int64_t)), NULL, NULL, 0};
    if (!w.first) return 1;
    w.first[0] = 0;
    for (int64_t i = 0; i < count; i++)
        w.first[i + 1] = w.first[i] + (jobs[i].size + SHARE - 1) / SHARE;
    w.part = malloc((w.first[count] + count) * sizeof(double));
    if (!w.part) return free(w.first), 1;
    w.step = w.part + w.first[count];
    for (int64_t i = 0; i < count; i++) w.step[i] = step_size(rule, jobs + i);
    const int64_t wanted = rule->threads < w.first[count] ? rule->threads : w.first[count];
    if (wanted < 2) take_shares(&w);
    else if (rule->parallel) rule->parallel(take_shares, &w, wanted, 0);
    else take_shares_together(&w, wanted);
    for (int64_t i = 0; i < count && rule->phi != NONE; i++) set_phi(&w, i);
    free(w.part);
    free(w.first);
    return 0;
}

/* AdaShift's step on a CPU: one pass over memory for all parameters of a group.

   cpu.py compiles this file with REAL (float or double), BITS (the unsigned integer of the same
   size), UNIT (the rounding error of REAL), and with BF16_PARAM or BF16_SLOT where parameters and
   gradients, or the slots of the window, are bfloat16. The window is explained in _window.py. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h> /* sqrt of a float is a float */

enum { PIECE = 1024 };  /* elements that stay in the first cache of a core */
enum { SHARE = 65536 }; /* elements that a thread takes at a time, however many threads there are */
enum { MAX, MEAN, ROW, NONE };
enum { CORRECTION, WEIGHT, ERROR = WEIGHT, BETA1, PEAKS }; /* places in Job.number */

#ifdef BF16_PARAM
typedef uint16_t PARAM;
#else
typedef REAL PARAM;
#endif
#ifdef BF16_SLOT
typedef uint16_t SLOT;
#else
typedef REAL SLOT;
#endif

typedef struct {
    double lr, beta1, beta2, eps, decay, coupled, sign;
    double total, last;          /* Σ_{i<m} β1^i and β1^m */
    int64_t n, m, phi;           /* m = 0: a window without end */
    int64_t threads, stochastic; /* the latter: rounding of bfloat16 parameters */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or NULL */
} Rule;

typedef struct {
    PARAM *p;
    REAL *sum;
    SLOT *slots;
    REAL *v, *phi, *number; /* phi: of the last n steps; number: see the places above */
    int64_t *step, size, rows, key; /* key: its place among the jobs, for the noise */
    const PARAM *g;
} Job;

typedef struct {
    int64_t first, length; /* number of its first share; elements of a share */
    int64_t phi, t;        /* rows of one element are elements */
    double total, correction, rate;
    int again; /* whether the window is summed again from its slots */
} Plan;

typedef struct {
    const Rule *rule;
    const Job *jobs;
    Plan *plan; /* of each job, and one more that ends the shares */
    int64_t count;
    double *top, *square; /* of each share: max |g| and Σ g² */
    atomic_llong next;
} Work;

static inline REAL from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* noise in 0 … 65535 rounds up with the probability that is right on average. */
static inline uint16_t to_bf16(float x, int stochastic, uint32_t noise) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = 0x7fff + (bits >> 16 & 1);
    if ((bits & 0x7f800000) == 0x7f800000) return bits >> 16 | (x != x) << 6; /* inf and NaN */
    return (bits + (stochastic ? noise : nearest)) >> 16;
}

static inline uint32_t mixed(uint32_t x) { /* a bijection whose bits look independent */
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

/* |x| as an integer: NaN is above inf, so a maximum keeps it. */
static inline BITS magnitude(REAL x) {
    BITS bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & (BITS)-1 >> 1;
}

static BITS largest_of(const REAL *x, int n, BITS top) {
    for (int i = 0; i < n; i++) top = magnitude(x[i]) > top ? magnitude(x[i]) : top;
    return top;
}

/* In double, since a float may overflow; eight sums, since the compiler may not reorder one. */
static double sum_of_squares(const REAL *x, int n) {
    double part[8] = {0}, rest = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) part[k] += (double)x[i + k] * x[i + k];
    for (; i < n; i++) rest += (double)x[i] * x[i];
    for (int k = 0; k < 8; k++) rest += part[k];
    return rest;
}

static double larger(double a, double b) { return a > b || a != a ? a : b; }

#ifdef BF16_SLOT
#define VALUE(slot) from_bf16(slot)
#define KEPT(x) to_bf16(x, 0, 0)
#else
#define VALUE(slot) (slot)
#define KEPT(x) (x)
#endif

/* Brings the sum of the window to step t; x are the newest gradients. */
static void absorb(const Rule *r, const Job *j, const Plan *q, int64_t a, int n,
                   const REAL *restrict x) {
    const REAL beta1 = r->beta1, last = r->last;
    REAL *restrict sum = j->sum + a;
    SLOT *restrict slot = j->slots + (r->m ? q->t % r->m * j->size + a : 0);
    if (r->m == 0)
        for (int i = 0; i < n; i++) sum[i] = beta1 == 0 ? x[i] : beta1 * sum[i] + x[i];
    else if (!q->again)
        for (int i = 0; i < n; i++) {
            const REAL old = VALUE(slot[i]);
            slot[i] = KEPT(x[i]);
            sum[i] = beta1 * sum[i] + VALUE(slot[i]) - last * old;
        }
    else {
        for (int i = 0; i < n; i++) slot[i] = KEPT(x[i]), sum[i] = 0;
        for (int64_t k = beta1 == 0 ? r->m : 1; k <= r->m; k++) { /* the oldest first */
            const SLOT *old = j->slots + (q->t + k) % r->m * j->size + a;
            for (int i = 0; i < n; i++) sum[i] = beta1 * sum[i] + VALUE(old[i]);
        }
    }
}

/* v_t = β2 v_{t−1} + (1 − β2) φ(g_{t−n}²): it never sees g_t. Returns α / (√v̂ + ε) / total, or
   −1 where nothing moves: in the first n steps, and where v is 0, since ε alone is no scale. */
static double rate(const Rule *r, const Plan *q, REAL *v, REAL phi) {
    if (q->t <= r->n) return -1;
    *v = r->beta2 * (double)*v + (1 - r->beta2) * (double)phi;
    return *v == 0 ? -1 : r->lr / (sqrt((double)*v / q->correction) + r->eps) / q->total;
}

/* One v for all: p ← decay · p − c · s. */
static void move_block(const Rule *r, REAL c, int n, REAL *restrict p, const REAL *restrict s) {
    const REAL decay = r->decay;
    for (int i = 0; i < n; i++) p[i] = decay * p[i] - c * s[i];
}

/* φ = none: a v for each element. */
static void move_elements(const Rule *r, const Job *j, const Plan *q, int64_t a, int n,
                          REAL *restrict p, const REAL *restrict x, const REAL *restrict s) {
    REAL *restrict v = j->v + a, *restrict phi = j->phi + q->t % r->n * j->size + a;
    const REAL beta2 = r->beta2, new = 1 - r->beta2, lr = r->lr / q->total, eps = r->eps;
    const REAL decay = r->decay, unbias = 1 / q->correction;
    if (q->t > r->n)
        for (int i = 0; i < n; i++) {
            v[i] = beta2 * v[i] + new * phi[i];
            const REAL moved = decay * p[i] - lr * s[i] / (sqrt(v[i] * unbias) + eps);
            p[i] = v[i] == 0 ? p[i] : moved;
        }
    for (int i = 0; i < n; i++) phi[i] = x[i] * x[i];
}

/* A step of elements a … a + n, which share the rate c; returns max |g|, adds Σ g² to square. */
static double step_span(const Rule *r, const Job *j, const Plan *q, int64_t a, int64_t n, double c,
                        double *square) {
    BITS top = 0;
    for (const int64_t end = a + n; a < end; a += PIECE) {
        const int size = end - a < PIECE ? end - a : PIECE;
        REAL turned[PIECE];
#ifdef BF16_PARAM
        REAL p[PIECE], g[PIECE];
        for (int i = 0; i < size; i++) p[i] = from_bf16(j->p[a + i]), g[i] = from_bf16(j->g[a + i]);
#else
        REAL *p = j->p + a;
        const REAL *g = j->g + a;
#endif
        const REAL *x = g;
        if (r->sign != 1 || r->coupled != 0) {
            const REAL sign = r->sign, coupled = r->coupled; /* 0 · inf is NaN */
            for (int i = 0; i < size; i++)
                turned[i] = coupled == 0 ? sign * g[i] : sign * g[i] + coupled * p[i];
            x = turned;
        }
        top = largest_of(x, size, top);
        if (q->phi == MEAN) *square += sum_of_squares(x, size);
        if (r->m != 1) absorb(r, j, q, a, size, x);
        const REAL *s = r->m == 1 ? x : j->sum + a;
        if (q->phi == NONE) move_elements(r, j, q, a, size, p, x, s);
        else if (c >= 0 || c != c) move_block(r, c, size, p, s);
#ifdef BF16_PARAM
        const uint32_t seed = mixed(q->t ^ mixed(j->key));
        for (int i = 0; i < size; i++)
            j->p[a + i] = to_bf16(p[i], r->stochastic, mixed(seed ^ (uint32_t)(a + i)) & 0xffff);
#endif
    }
    REAL found;
    memcpy(&found, &top, sizeof found);
    return found;
}

static void step_share(Work *w, int64_t i, int64_t share) {
    const Rule *r = w->rule;
    const Job *j = w->jobs + i;
    const Plan *q = w->plan + i;
    const int64_t a = (share - q->first) * q->length;
    const int64_t end = a + q->length < j->size ? a + q->length : j->size, row = j->size / j->rows;
    double top = 0, square = 0;
    if (q->phi != ROW) top = step_span(r, j, q, a, end - a, q->rate, &square);
    else
        for (int64_t k = a / row; k < end / row; k++) {
            REAL *phi = j->phi + q->t % r->n * j->rows + k;
            const double c = rate(r, q, j->v + k, *phi);
            const double found = step_span(r, j, q, k * row, row, c, &square);
            *phi = found * found;
            top = larger(found, top);
        }
    w->top[share] = top;
    w->square[share] = square;
}

/* Takes neighbors together, fewer towards the end: a thread reads long runs, and none waits long. */
static void take_shares(void *argument) {
    Work *w = argument;
    const int64_t all = w->plan[w->count].first;
    for (long long i = 0, share = 0, end; share < all;) {
        do end = share + 1 + (all - share) / (4 * w->rule->threads);
        while (!atomic_compare_exchange_weak(&w->next, &share, end));
        for (; share < end && share < all; share++) {
            while (w->plan[i + 1].first <= share) i++;
            step_share(w, i, share);
        }
    }
}

/* The largest gradient of the last m − 1 steps; peak[t % m], of m steps ago, leaves the window. */
static double largest_peak(const Rule *r, const Job *j, int64_t t) {
    double top = 0;
    for (int64_t k = 1; k < r->m; k++) top = larger(j->number[PEAKS + (t + k) % r->m], top);
    return top;
}

/* The error of the running sum after step t, for gradients up to `peak`: see _window.py. */
static double error_after(const Rule *r, const Job *j, int64_t t, double peak) {
    const double largest = larger(peak, j->number[PEAKS + t % r->m]);
    return r->beta1 * j->number[ERROR] + 3 * UNIT * (r->total + 2 * r->last) * largest;
}

static int must_sum_again(const Rule *r, const Job *j, int64_t t) {
    if (r->m < 2) return 0;
    const int same = j->number[BETA1] == (REAL)r->beta1 && r->beta1 != 0;
    const double peak = largest_peak(r, j, t), error = error_after(r, j, t, peak);
    return !(same && isfinite(error) && error <= 25 * UNIT * r->total * r->total * peak);
}

static void make_plan(const Rule *r, const Job *j, Plan *q) {
    const int64_t t = q->t = *j->step + 1;
    q->correction = t > r->n ? r->beta2 * j->number[CORRECTION] + (1 - r->beta2) : 0;
    q->total = r->m ? r->total : r->beta1 * j->number[WEIGHT] + 1;
    q->again = must_sum_again(r, j, t);
    q->rate = q->phi < ROW ? rate(r, q, j->v, j->phi[t % r->n]) : -1;
}

/* Brings the numbers of a job to the end of its step. */
static void finish(const Work *w, int64_t i) {
    const Rule *r = w->rule;
    const Job *j = w->jobs + i;
    const Plan *q = w->plan + i;
    double top = 0, square = 0;
    for (int64_t k = q->first; k < q[1].first; k++)
        top = larger(w->top[k], top), square += w->square[k] / j->size;
    if (q->phi < ROW) j->phi[q->t % r->n] = q->phi == MAX ? (REAL)top * (REAL)top : square;
    j->number[CORRECTION] = q->correction;
    if (r->m == 0) j->number[WEIGHT] = q->total;
    if (r->m > 1) {
        const double peak = larger(top, largest_peak(r, j, q->t));
        const double error = q->again ? 2 * UNIT * r->total * r->total * peak
                                      : error_after(r, j, q->t, peak);
        j->number[ERROR] = error * (1 + 4 * UNIT);
        j->number[BETA1] = r->beta1;
        j->number[PEAKS + q->t % r->m] = top;
    }
    *j->step = q->t;
}

/* Returns 0, or 1 if there is no memory for the plan; then nothing has been changed. */
int adashift_step(const Rule *rule, const Job *jobs, int64_t count) {
    Work w = {rule, jobs, malloc((count + 1) * sizeof(Plan)), count, NULL, NULL, 0};
    if (!w.plan) return 1;
    int64_t shares = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = jobs[i].size / jobs[i].rows;
        const int64_t phi = rule->phi == ROW && row == 1 ? NONE : rule->phi;
        const int64_t length = phi != ROW ? SHARE : row < SHARE ? SHARE / row * row : row;
        w.plan[i] = (Plan){.first = shares, .length = length, .phi = phi};
        shares += (jobs[i].size + length - 1) / length;
    }
    w.plan[count].first = shares;
    w.top = malloc(2 * shares * sizeof(double));
    if (!w.top) return free(w.plan), 1;
    w.square = w.top + shares;
    for (int64_t i = 0; i < count; i++) make_plan(rule, jobs + i, w.plan + i);
    const int64_t wanted = rule->threads < shares ? rule->threads : shares;
    if (wanted < 2 || !rule->parallel) take_shares(&w);
    else rule->parallel(take_shares, &w, wanted, 0);
    for (int64_t i = 0; i < count; i++) finish(&w, i);
    free(w.top);
    free(w.plan);
    return 0;
}

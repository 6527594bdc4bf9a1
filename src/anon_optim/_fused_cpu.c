/* One step of a batch of tensors on the CPU, in one pass over memory; built and called by _fused_cpu.py.

   A thread takes runs of blocks and works through them in tiles that stay in its L1 cache. Every tile is computed in
   float32, whatever the parameters, gradients and preconditioner are kept in. On most steps no preconditioner changes,
   so a tile only looks whether one would; the work for those that do (powers, divisions, the store) comes after.
   The recursion of psi and the guards are those of _idu.py; tests hold the two equal.

   What an element becomes depends on nothing but its own tile and sums taken in a fixed order, so the number of threads
   does not change a bit. No fast-math: NaN, infinities and zeros mean what they say. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 128
#define BLOCK 2048 /* sums are taken over so many elements */
#define GRAIN 1024 /* a thread takes at most so many blocks at a time */
#define LANES 16
#define SERIAL 32768 /* with fewer elements, waking other threads takes longer than the step */
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, PRECONDITIONER };
enum { FORESEEN, AVERAGE, EXCESS };
enum { DUE, ACCUMULATE, BIAS_CORRECTION1, LR, GAMMA, WEIGHT, CHANGED, BETA3, BIAS_CORRECTION2,
       CLOCK_COLUMNS };

/* Total and count of s over one block, where it is positive and finite. */
typedef struct {
    double total, count;
} Sums;

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

/* The mirror of _fused_cpu.Arguments. */
typedef struct {
    const int64_t *table;       /* addresses, a row for each of PARAM ... PRECONDITIONER */
    const int64_t *numels;
    const int64_t *first_block; /* of each tensor, and their total */
    float *levels;              /* of each tensor */
    float *brakes;              /* three of each tensor, see _idu.py */
    const float *weights;       /* of each tensor; unused with a clock */
    const double *beta3s;       /* of each tensor, for a refresh; unused with a clock */
    const float *clock;         /* NULL: the host decides */
    Sums *sums;                 /* of each block, for a refresh */
    double *means;              /* of sigma, for each tensor */
    double *powers;             /* of each block, for the brake */
    Parallel parallel;          /* GOMP_parallel, or NULL */
    int64_t n_tensors, n_elements, grain, next;
    int64_t braked;             /* a tensor of fewer elements has no brake */
    uint64_t seed;
    double lr, gamma, new_gamma, bias_correction1, weight_decay, factor, beta1, beta2, eps, clip, floor;
    double tail; /* a coordinate counts at most so many times the power foreseen */
    double bias_correction2;
    int32_t threads, param_dtype, grad_dtype, preconditioner_dtype;
    int32_t due, accumulate, changed, decoupled, coupled, belief, masked, touch, lr_scale, stochastic, brake, follow;
} Step;

/* A tensor's share of the numbers. */
typedef struct {
    int due, accumulate, changed;
    int halves; /* 2 gamma, where that is 1, 2, 3 or 4; else 0 */
    int follow_halves; /* the same, however small the bound is */
    float bound, watch, decay, step_size, most; /* bound: infinite where nothing is clipped */
    float share; /* of Adam's average in s, as a factor; 0 where psi does not follow it */
    double gamma, level, mean, inverse_weight, beta3;
} Turn;

/* Numbers of 16 bits. */

INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

INLINE float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

INLINE uint64_t bits_of_double(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    return u;
}

INLINE double double_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, 8);
    return x;
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t u = bits_of(x);
    uint32_t nearest = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : nearest;
}

INLINE float from_float16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13;
    float normal = from_bits(magnitude + (112u << 23));
    float subnormal = from_bits(magnitude + (113u << 23)) - 0x1p-14f;
    float special = from_bits(magnitude + (224u << 23));
    float x = magnitude >= (31u << 23) ? special : magnitude >= (1u << 23) ? normal : subnormal;
    return from_bits(bits_of(x) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t to_float16(float x) {
    uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFF;
    uint32_t normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t h = magnitude < (113u << 23) ? subnormal : normal;
    h = magnitude >= 0x477FF000 ? 0x7C00 : h; /* 65520 and above round to infinity */
    h = magnitude > 0x7F800000 ? 0x7E00 : h;
    return h | (u >> 16 & 0x8000);
}

static void widen(const void *from, float *to, int n, int dtype) {
    const uint16_t *x = from;
    if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) to[i] = from_bits((uint32_t)x[i] << 16);
    else
        for (int i = 0; i < n; i++) to[i] = from_float16(x[i]);
}

static void narrow(const float *from, void *to, int n, int dtype) {
    uint16_t *x = to;
    if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) x[i] = to_bfloat16(from[i]);
    else
        for (int i = 0; i < n; i++) x[i] = to_float16(from[i]);
}

/* Random bits by position: every tile has its own key, and each element hashes its place in the tile. */

INLINE uint64_t tile_key(uint64_t seed, uint64_t tile) {
    uint64_t x = seed + tile * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

INLINE uint32_t noise16(uint32_t place, uint64_t key) {
    uint32_t x = place * 0x9E3779B9u + (uint32_t)key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0x846CA68Bu;
    return x >> 16;
}

/* A bfloat16 is the upper half of a float32: a random lower half carries into it with the right probability. */
static void narrow_stochastic(const float *from, uint16_t *to, int n, uint64_t key) {
    for (int i = 0; i < n; i++) {
        uint32_t u = bits_of(from[i]);
        uint32_t rounded = (u + noise16(i, key)) >> 16;
        to[i] = fabsf(from[i]) <= 0x1.FEp127f ? rounded : to_bfloat16(from[i]);
    }
}

/* Powers, in double so that neither sigma^gamma nor its logarithm has to be watched; written so that they vectorise. */

INLINE double clamp(double x, double least, double most) {
    x = x > least ? x : least;
    return x < most ? x : most;
}

/* Error below 3e-11, for positive normal x. */
INLINE double log2_of(double x) {
    uint64_t u = bits_of_double(x);
    /* Measured from sqrt(1/2), so that the mantissa lies in [sqrt(1/2), sqrt(2)). */
    uint64_t shifted = u - 0x3FE6A09E667F3BCDu + (1023ull << 52);
    double exponent = double_from_bits(shifted >> 52 | 0x4330000000000000u) - (0x1p52 + 1023);
    double mantissa = double_from_bits((shifted & 0xFFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu);
    double z = (mantissa - 1) / (mantissa + 1), z2 = z * z;
    double series = 1 + z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * (1.0 / 9 + z2 * (1.0 / 11)))));
    return exponent + z * series * 2.8853900817779268;
}

/* Relative error below 1e-11, for |x| < 1000. */
INLINE double exp2_of(double x) {
    double shifted = x + 0x1.8p52;
    double y = (x - (shifted - 0x1.8p52)) * 0.6931471805599453;
    double series =
        1 + y * (1 + y * (1.0 / 2 + y * (1.0 / 6 + y * (1.0 / 24 + y * (1.0 / 120 + y * (1.0 / 720 +
        y * (1.0 / 5040 + y * (1.0 / 40320 + y * (1.0 / 362880)))))))));
    return series * double_from_bits((bits_of_double(shifted) + 1023) << 52);
}

/* sigma^power; v stays in float32's range, so what lies beyond 2^+-900 is all the same. */
INLINE double power_of(double sigma, double power) {
    return exp2_of(clamp(power * log2_of(clamp(sigma, FLT_MIN, FLT_MAX)), -900, 900));
}

/* What a coordinate of mean sigma moves by per unit of lr; 1 before a refresh has set the level. */
static double scale_of(double level, double gamma) {
    return level > 0 ? clamp(power_of(level, (1 - gamma) / 2), FLT_MIN, FLT_MAX) : 1;
}

/* Tiles. `p`, `g`, `m`, `s` and `v` are float32: the tensors themselves, or copies. Each loop below brings in one or
   two of them and finds the others in the cache, because memory serves few streams at a time better than many. */

INLINE float sample_of(float raw, float grad, float m, int belief, int masked) {
    float x = belief ? grad - m : grad;
    return masked && raw == 0 ? 0 : x * x;
}

/* m <- beta1 m + (1 - beta1) g */
INLINE void average(int n, const float *restrict p, const float *restrict g, float *restrict m, const Step *x,
                    int coupled) {
    float factor = x->factor, lerp = 1 - x->beta1, decay = x->weight_decay;
    for (int i = 0; i < n; i++) {
        float grad = g[i] * factor;
        if (coupled) grad += decay * p[i];
        m[i] += (grad - m[i]) * lerp;
    }
}

/* s <- beta2 s + (1 - beta2) sample */
INLINE void accumulate(int n, const float *restrict p, const float *restrict g, const float *restrict m,
                       float *restrict s, const Step *x, int coupled, int belief, int masked) {
    float factor = x->factor, beta2 = x->beta2, lerp = 1 - x->beta2, decay = x->weight_decay;
    for (int i = 0; i < n; i++) {
        float raw = g[i] * factor, grad = coupled ? raw + decay * p[i] : raw;
        s[i] = s[i] * beta2 + sample_of(raw, grad, m[i], belief, masked) * lerp;
    }
}

INLINE void moments(int n, const float *p, const float *g, float *m, float *s, const Step *x, int accumulates) {
    if (x->coupled)
        average(n, p, g, m, x, 1);
    else
        average(n, p, g, m, x, 0);
    if (!accumulates) return;
    if (x->coupled || x->belief)
        accumulate(n, p, g, m, s, x, x->coupled, x->belief, x->masked);
    else
        accumulate(n, p, g, m, s, x, 0, 0, 0);
}

INLINE float clamp_normal(float x) {
    x = x > FLT_MIN ? x : FLT_MIN;
    return x < FLT_MAX ? x : FLT_MAX;
}

INLINE float size_of(float m) {
    float size = fabsf(m);
    return size > FLT_MIN ? size : FLT_MIN;
}

/* Error below ROUGH, for positive normal x; in float32, for a look at every element. */
#define ROUGH 1.1e-4f
INLINE float rough_log2(float x) {
    uint32_t u = bits_of(x);
    float exponent = (int32_t)(u >> 23) - 127, f = from_bits((u & 0x7FFFFF) | 0x3F800000) - 1;
    return exponent + f * (1.43901464f + f * (-0.6799438f + f * (0.32559525f - f * 0.08476842f)));
}

/* Whether v may be beyond the clip, v |m|^gamma > bound^gamma. Where 2 gamma is one of 1, 2, 3 and 4, here `halves`,
   products tell, for 1 and 3 of the squares; else, and where bound is so small that products leave float32's normal
   numbers, `halves` is 0 and logarithms do. */
#define LEAST_BOUND 1e-2f
INLINE int32_t beyond(float v, float m, float watch, float gamma, int halves) {
    float size = size_of(m);
    switch (halves) {
    case 1: return v * v * size > watch;
    case 2: return v * size > watch;
    case 3: return (v * size) * (v * size) * size > watch;
    case 4: return v * size * size > watch;
    }
    return rough_log2(v) + gamma * rough_log2(size) > watch;
}

/* Whether v has to change: it is unseen and has a gradient, or it is beyond the clip. */
INLINE int32_t turns(float v, float grad, float m, float watch, int halves) {
    return beyond(v, m, watch, 0, halves) | ((v == 0) & (grad != 0));
}

/* Whether some v has to change. */
INLINE int32_t look(int n, const float *restrict g, const float *restrict m, const float *restrict v, float factor,
                    float watch, int halves) {
    int32_t found = 0;
    for (int i = 0; i < n; i++) found |= turns(v[i], g[i] * factor, m[i], watch, halves);
    return found;
}

static int look_all(int n, const float *g, const float *m, const float *v, float factor, const Turn *turn) {
    switch (turn->halves) {
    case 1: return look(n, g, m, v, factor, turn->watch, 1);
    case 2: return look(n, g, m, v, factor, turn->watch, 2);
    case 3: return look(n, g, m, v, factor, turn->watch, 3);
    case 4: return look(n, g, m, v, factor, turn->watch, 4);
    }
    return 1;
}

/* (bound / |m|)^gamma */
INLINE float limit_of(float m, float bound, double gamma, int halves) {
    float limit = bound / size_of(m);
    if (halves == 0) return clamp(power_of(limit, gamma), FLT_MIN, FLT_MAX);
    float power = halves == 4 ? limit * limit : halves == 2 ? limit : (halves == 3 ? limit : 1) * sqrtf(limit);
    return power > FLT_MIN ? power : FLT_MIN;
}

/* v <- min(v, (bound / |m|)^gamma): psi itself rises, and stays risen until the next refresh. */
INLINE int32_t clip(int n, const float *restrict m, float *restrict v, float bound, double gamma, int halves) {
    int32_t changed = 0;
    for (int i = 0; i < n; i++) {
        float limit = limit_of(m[i], bound, gamma, halves), now = v[i] < limit ? v[i] : limit;
        changed |= now != v[i];
        v[i] = now;
    }
    return changed;
}

/* Returns whether some v has changed. Logarithms are taken only of lanes among which one may be beyond it. */
static int clip_all(int n, const float *m, float *v, const Turn *turn) {
    if (turn->bound == INFINITY) return 0;
    switch (turn->halves) {
    case 1: return clip(n, m, v, turn->bound, 0, 1);
    case 2: return clip(n, m, v, turn->bound, 0, 2);
    case 3: return clip(n, m, v, turn->bound, 0, 3);
    case 4: return clip(n, m, v, turn->bound, 0, 4);
    }
    int32_t changed = 0;
    for (int i = 0; i < n; i += LANES) {
        if (n - i < LANES) return changed | clip(n - i, m + i, v + i, turn->bound, turn->gamma, 0);
        int32_t found = 0;
        for (int j = i; j < i + LANES; j++) found |= beyond(v[j], m[j], turn->watch, turn->gamma, 0);
        if (found) changed |= clip(LANES, m + i, v + i, turn->bound, turn->gamma, 0);
    }
    return changed;
}

/* Whether v may be beyond sigma^(-gamma/2), a little early; as in `beyond`, products tell for some gamma. */
INLINE int32_t lags(float v, float sigma, float gamma, int halves) {
    const float most = 1 - 0x1p-18f;
    switch (halves) {
    case 1: return (v * v) * (v * v) * sigma > most;
    case 2: return v * v * sigma > most;
    case 3: return (v * sigma) * (v * sigma) * (v * sigma * v) > most;
    case 4: return v * sigma > most;
    }
    return rough_log2(v) + 0.5f * gamma * rough_log2(sigma) > -ROUGH * (1 + gamma);
}

/* sigma^(-gamma/2) */
INLINE float risen(float sigma, double gamma, int halves) {
    if (halves == 0) return clamp(power_of(sigma, -gamma / 2), FLT_MIN, FLT_MAX);
    sigma = clamp_normal(sigma);
    float root = sqrtf(sigma);
    return clamp_normal(1 / (halves == 4 ? sigma : halves == 2 ? root : (halves == 3 ? root : 1) * sqrtf(root)));
}

/* v <- min(v, sigma^(-gamma/2)) with the share of s in Adam's average as sigma; returns whether some v has changed. */
INLINE int32_t follow(int n, const float *restrict s, float *restrict v, float share, float eps, double gamma,
                      int halves) {
    int32_t found = 0, changed = 0;
    float rough = gamma;
    for (int i = 0; i < n; i++) found |= lags(v[i], s[i] * share + eps, rough, halves);
    for (int i = 0; i < n && found; i++) {
        float limit = risen(s[i] * share + eps, gamma, halves), now = v[i] < limit ? v[i] : limit;
        changed |= now != v[i];
        v[i] = now;
    }
    return changed;
}

static int follow_all(int n, const float *s, float *v, const Step *x, const Turn *turn) {
    if (turn->share == 0) return 0;
    switch (turn->follow_halves) {
    case 1: return follow(n, s, v, turn->share, x->eps, 0, 1);
    case 2: return follow(n, s, v, turn->share, x->eps, 0, 2);
    case 3: return follow(n, s, v, turn->share, x->eps, 0, 3);
    case 4: return follow(n, s, v, turn->share, x->eps, 0, 4);
    }
    return follow(n, s, v, turn->share, x->eps, turn->gamma, 0);
}

/* Touch and clip; returns whether some v has changed. */
static int guard(int n, const float *restrict p, const float *restrict g, const float *restrict m, float *restrict v,
                 const Step *x, const Turn *turn) {
    float factor = x->factor, decay = x->weight_decay;
    double least = x->floor * turn->level;
    int32_t unseen = 0;
    for (int i = 0; i < n; i++) unseen |= (v[i] == 0) & (g[i] * factor != 0);
    for (int i = 0; i < n && unseen && x->touch; i++) {
        float raw = g[i] * factor;
        if (v[i] != 0 || raw == 0) continue;
        float grad = x->coupled ? raw + decay * p[i] : raw;
        double sigma = sample_of(raw, grad, m[i], x->belief, 0) + x->eps;
        v[i] = clamp(power_of(sigma > least ? sigma : least, -turn->gamma / 2), FLT_MIN, FLT_MAX);
    }
    return clip_all(n, m, v, turn) | unseen;
}

/* The sum over a block of what each coordinate adds to the power, in a fixed order. */
typedef struct {
    float lanes[LANES];
} Power;

INLINE float at_most(float x, float most) { return x < most ? x : most; }

/* Adds x v^2. */
INLINE void add_power(int n, const float *restrict x, const float *restrict v, float most, Power *power) {
    Power sum = *power;
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) sum.lanes[j] += at_most(x[i + j] * v[i + j] * v[i + j], most);
    for (int i = whole; i < n; i++) sum.lanes[i - whole] += at_most(x[i] * v[i] * v[i], most);
    *power = sum;
}

/* Adds (g v)^2. */
INLINE void add_gradients(int n, const float *restrict g, const float *restrict v, float factor, float most,
                          Power *power) {
    Power sum = *power;
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float u = g[i + j] * factor * v[i + j];
            sum.lanes[j] += at_most(u * u, most);
        }
    for (int i = whole; i < n; i++) {
        float u = g[i] * factor * v[i];
        sum.lanes[i - whole] += at_most(u * u, most);
    }
    *power = sum;
}

/* `look` and `add_gradients` in one pass, for whole lanes. */
INLINE int32_t look_and_add(int n, const float *restrict g, const float *restrict m, const float *restrict v,
                            float factor, float watch, int halves, float most, Power *power) {
    Power sum = *power;
    int32_t found[LANES] = {0}, any = 0;
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float grad = g[i + j] * factor, u = grad * v[i + j];
            sum.lanes[j] += at_most(u * u, most);
            found[j] |= turns(v[i + j], grad, m[i + j], watch, halves);
        }
    for (int j = 0; j < LANES; j++) any |= found[j];
    *power = sum;
    return any;
}

static int look_and_add_all(int n, const float *g, const float *m, const float *v, float factor, const Turn *turn,
                            Power *power) {
    switch (turn->halves) {
    case 1: return look_and_add(n, g, m, v, factor, turn->watch, 1, turn->most, power);
    case 2: return look_and_add(n, g, m, v, factor, turn->watch, 2, turn->most, power);
    case 3: return look_and_add(n, g, m, v, factor, turn->watch, 3, turn->most, power);
    case 4: return look_and_add(n, g, m, v, factor, turn->watch, 4, turn->most, power);
    }
    return 1;
}

static void add_samples(int n, const float *p, const float *g, const float *m, const float *v, const Step *x,
                        float most, Power *power) {
    float samples[TILE], factor = x->factor, decay = x->weight_decay;
    for (int i = 0; i < n; i++) {
        float raw = g[i] * factor, grad = x->coupled ? raw + decay * p[i] : raw;
        samples[i] = sample_of(raw, grad, m[i], x->belief, x->masked);
    }
    add_power(n, samples, v, most, power);
}

/* theta <- decay theta - lr v m_hat */
INLINE void move(int n, float *restrict p, const float *restrict m, const float *restrict v, float decay,
                 float step_size) {
    for (int i = 0; i < n; i++) p[i] = p[i] * decay - v[i] * m[i] * step_size;
}

/* A step between refreshes; returns whether some v has changed. */
INLINE int plain(int n, float *p, const float *g, float *m, float *s, float *v, const Step *x, const Turn *turn,
                 Power *power) {
    moments(n, p, g, m, s, x, turn->accumulate);
    int followed = follow_all(n, s, v, x, turn), changed;
    if (x->brake && turn->halves && n % LANES == 0 && !x->coupled && !x->belief) {
        Power before = *power;
        changed = look_and_add_all(n, g, m, v, x->factor, turn, power) && guard(n, p, g, m, v, x, turn);
        if (changed) {
            *power = before;
            add_gradients(n, g, v, x->factor, turn->most, power);
        }
    } else {
        changed = look_all(n, g, m, v, x->factor, turn) && guard(n, p, g, m, v, x, turn);
        if (x->brake && (x->coupled || x->belief))
            add_samples(n, p, g, m, v, x, turn->most, power);
        else if (x->brake)
            add_gradients(n, g, v, x->factor, turn->most, power);
    }
    move(n, p, m, v, turn->decay, turn->step_size);
    return changed | followed;
}

/* psi2 <- sigma^gamma at the first refresh, beta3 psi2 + (1 - beta3) sigma^gamma later. With v = psi^-1 the latter is
   v <- v / sqrt(beta3 + (1 - beta3) sigma^gamma v^2). In s of an unseen coordinate there is one sample. */
INLINE void recursion(int n, const float *restrict s, float *restrict v, const Step *x, const Turn *turn) {
    double gamma = x->new_gamma, beta3 = turn->beta3, eps = x->eps, inverse_weight = turn->inverse_weight;
    double least = x->floor * turn->mean, one_sample = 1 / (1 - x->beta2);
    float kept = turn->changed ? 0 : 1;
    int waits = x->touch;
    for (int i = 0; i < n; i++) {
        float old = v[i] * kept;
        double sigma = s[i] * (v[i] == 0 ? one_sample : inverse_weight) + eps;
        double fresh = power_of(sigma > least ? sigma : least, gamma);
        double top = old == 0 ? 1 : old;
        double bottom = old == 0 ? fresh : beta3 + (1 - beta3) * fresh * top * top;
        float now = clamp(top / sqrt(bottom), FLT_MIN, FLT_MAX);
        int taught = (s[i] > 0) & (s[i] <= FLT_MAX);
        v[i] = waits & !taught ? old : now;
    }
}

/* The same at gamma = 1, where float32 is enough: 1/sqrt(sigma) is far from its limits. What is small beside
   (1 - beta3) sigma v^2 is left out before that overflows. */
INLINE void recursion_of_adam(int n, const float *restrict s, float *restrict v, const Step *x, const Turn *turn) {
    float beta3 = turn->beta3, rest = 1 - turn->beta3, eps = x->eps, inverse_weight = turn->inverse_weight;
    float least = x->floor * turn->mean, one_sample = 1 / (1 - x->beta2);
    float kept = turn->changed ? 0 : 1;
    int waits = x->touch;
    for (int i = 0; i < n; i++) {
        float old = v[i] * kept;
        float sigma = s[i] * (v[i] == 0 ? one_sample : inverse_weight) + eps;
        sigma = clamp_normal(sigma > least ? sigma : least);
        float ratio = rest * sigma * old * old;
        float bottom = old == 0 ? sigma : ratio > 1e30f ? rest * sigma : beta3 + ratio;
        float top = (old == 0) | (ratio > 1e30f) ? 1 : old;
        float now = clamp_normal(top / sqrtf(bottom));
        int taught = (s[i] > 0) & (s[i] <= FLT_MAX);
        v[i] = waits & !taught ? old : now;
    }
}

static void refresh(int n, const float *m, float *s, float *v, const Step *x, const Turn *turn, Power *power) {
    if (x->new_gamma == 0)
        for (int i = 0; i < n; i++) v[i] = 1;
    else if (x->new_gamma == 1 && turn->beta3 > 1e-6)
        recursion_of_adam(n, s, v, x, turn);
    else
        recursion(n, s, v, x, turn);
    clip_all(n, m, v, turn);
    if (x->brake) {
        for (int i = 0; i < n; i++) s[i] = s[i] <= FLT_MAX ? s[i] : 0;
        add_power(n, s, v, INFINITY, power);
    }
    memset(s, 0, n * sizeof(float));
}

typedef struct {
    double total[LANES];
    int32_t count[LANES];
} Lanes;

INLINE void add_lanes(const float *s, Lanes *lanes) {
    for (int j = 0; j < LANES; j++) {
        int taught = (s[j] > 0) & (s[j] <= FLT_MAX);
        float x = taught ? s[j] : 0;
        lanes->total[j] += x;
        lanes->count[j] += taught;
    }
}

static Sums sum_block(int n, const float *s) {
    Lanes lanes = {{0}, {0}};
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES) add_lanes(s + i, &lanes);
    if (whole < n) {
        float rest[LANES] = {0};
        memcpy(rest, s + whole, (n - whole) * sizeof(float));
        add_lanes(rest, &lanes);
    }
    Sums sums = {0, 0};
    for (int j = 0; j < LANES; j++) {
        sums.total += lanes.total[j];
        sums.count += lanes.count[j];
    }
    return sums;
}

/* Tensors. */

static void *address(const Step *x, int row, int64_t tensor) {
    return (void *)(intptr_t)x->table[row * x->n_tensors + tensor];
}

static void *element(const Step *x, int row, int64_t tensor, int64_t i, int dtype) {
    return (char *)address(x, row, tensor) + i * (dtype == FLOAT32 ? 4 : 2);
}

static double weight_of(const Step *x, int64_t tensor) {
    return x->clock ? x->clock[tensor * CLOCK_COLUMNS + WEIGHT] : x->weights[tensor];
}

static double beta3_of(const Step *x, int64_t tensor) {
    return x->clock ? x->clock[tensor * CLOCK_COLUMNS + BETA3] : x->beta3s[tensor];
}

static Turn turn_of(const Step *x, int64_t tensor) {
    const float *clock = x->clock ? x->clock + tensor * CLOCK_COLUMNS : 0;
    Turn turn = {.due = clock ? clock[DUE] > 0 : x->due,
                 .accumulate = clock ? clock[ACCUMULATE] != 0 : x->accumulate,
                 .changed = clock ? clock[CHANGED] != 0 : x->changed};
    double bias_correction1 = clock ? clock[BIAS_CORRECTION1] : x->bias_correction1, lr = clock ? clock[LR] : x->lr;
    turn.gamma = turn.due ? x->new_gamma : clock ? clock[GAMMA] : x->gamma;
    turn.level = x->levels[tensor];
    turn.bound = turn.gamma > 0 ? x->clip * bias_correction1 : INFINITY;
    int is_half = turn.gamma == 0.5 || turn.gamma == 1 || turn.gamma == 1.5 || turn.gamma == 2;
    turn.halves = is_half && turn.bound > LEAST_BOUND ? 2 * turn.gamma : 0;
    turn.follow_halves = is_half ? 2 * turn.gamma : 0;
    if (x->follow && !turn.due && turn.accumulate && turn.gamma > 0)
        turn.share = 1 / (clock ? clock[BIAS_CORRECTION2] : x->bias_correction2);
    /* A little early: the exact test is the clip's. */
    if (turn.bound == INFINITY)
        turn.watch = INFINITY;
    else if (turn.halves) {
        double watch = pow(turn.bound, turn.halves % 2 ? turn.halves : turn.halves / 2);
        turn.watch = clamp(watch, 0, FLT_MAX) * (1 - 0x1p-18f);
    } else
        turn.watch = turn.gamma * log2(turn.bound) - ROUGH * (1 + turn.gamma);
    turn.decay = x->decoupled ? 1 - lr * x->weight_decay : 1;
    turn.step_size = lr / bias_correction1 / (x->lr_scale ? scale_of(turn.level, turn.gamma) : 1);
    if (x->brake && !turn.due && turn.gamma > 0) {
        double excess = x->brakes[3 * tensor + EXCESS];
        turn.most = x->tail * x->brakes[3 * tensor + FORESEEN];
        if (excess > 1) turn.step_size *= pow(excess, -turn.gamma / 2);
    }
    if (turn.due) {
        turn.mean = x->means[tensor];
        turn.inverse_weight = 1 / weight_of(x, tensor);
        turn.beta3 = beta3_of(x, tensor);
    }
    return turn;
}

static void store_param(const Step *x, int64_t tensor, int64_t i, int n, const float *p, void *to) {
    if (!x->stochastic) {
        narrow(p, to, n, x->param_dtype);
        return;
    }
    uint64_t tile = (x->first_block[tensor] * BLOCK + i) / TILE;
    narrow_stochastic(p, to, n, tile_key(x->seed, tile));
}

static void step_tile(const Step *x, const Turn *turn, int64_t tensor, int64_t i, int n, Power *power) {
    float p_copy[TILE], g_copy[TILE], v_copy[TILE];
    void *p_at = element(x, PARAM, tensor, i, x->param_dtype);
    void *g_at = element(x, GRAD, tensor, i, x->grad_dtype);
    void *v_at = element(x, PRECONDITIONER, tensor, i, x->preconditioner_dtype);
    float *m = element(x, EXP_AVG, tensor, i, FLOAT32);
    /* A released s has no elements to point to. */
    float *s = turn->due || turn->accumulate ? element(x, EXP_AVG_SQ, tensor, i, FLOAT32) : 0;
    float *p = x->param_dtype == FLOAT32 ? p_at : p_copy, *g = x->grad_dtype == FLOAT32 ? g_at : g_copy;
    float *v = x->preconditioner_dtype == FLOAT32 ? v_at : v_copy;
    if (p == p_copy) widen(p_at, p, n, x->param_dtype);
    if (v == v_copy) widen(v_at, v, n, x->preconditioner_dtype);
    int changed = 1;
    if (turn->due) {
        refresh(n, m, s, v, x, turn, power);
        move(n, p, m, v, turn->decay, turn->step_size);
    } else {
        if (g == g_copy) widen(g_at, g, n, x->grad_dtype);
        changed = n == TILE ? plain(TILE, p, g, m, s, v, x, turn, power) : plain(n, p, g, m, s, v, x, turn, power);
    }
    if (changed && v == v_copy) narrow(v, v_at, n, x->preconditioner_dtype);
    if (p == p_copy) store_param(x, tensor, i, n, p, p_at);
}

static void moments_tile(const Step *x, int64_t tensor, int64_t i, int n) {
    float p_copy[TILE], g_copy[TILE];
    void *p_at = element(x, PARAM, tensor, i, x->param_dtype);
    void *g_at = element(x, GRAD, tensor, i, x->grad_dtype);
    float *m = element(x, EXP_AVG, tensor, i, FLOAT32), *s = element(x, EXP_AVG_SQ, tensor, i, FLOAT32);
    float *p = x->param_dtype == FLOAT32 ? p_at : p_copy, *g = x->grad_dtype == FLOAT32 ? g_at : g_copy;
    if (p == p_copy && x->coupled) widen(p_at, p, n, x->param_dtype);
    if (g == g_copy) widen(g_at, g, n, x->grad_dtype);
    moments(n, p, g, m, s, x, 1);
}

/* Blocks `begin` to `end` of a tensor. */

static void step_blocks(const Step *x, int64_t tensor, int64_t begin, int64_t end) {
    if (x->clock && x->clock[tensor * CLOCK_COLUMNS + DUE] < 0) return; /* the tensor skips this step */
    Turn turn = turn_of(x, tensor);
    for (int64_t b = begin; b < end; b++) {
        int64_t start = b * BLOCK, left = x->numels[tensor] - start;
        int n = left < BLOCK ? left : BLOCK;
        Power power = {{0}};
        for (int i = 0; i < n; i += TILE) step_tile(x, &turn, tensor, start + i, n - i < TILE ? n - i : TILE, &power);
        if (x->brake) {
            double total = 0;
            for (int j = 0; j < LANES; j++) total += power.lanes[j];
            x->powers[x->first_block[tensor] + b] = turn.due ? total * turn.inverse_weight : total;
        }
    }
}

static void moments_blocks(const Step *x, int64_t tensor, int64_t begin, int64_t end) {
    if (x->clock && x->clock[tensor * CLOCK_COLUMNS + DUE] <= 0) return;
    for (int64_t b = begin; b < end; b++) {
        int64_t start = b * BLOCK, left = x->numels[tensor] - start;
        int n = left < BLOCK ? left : BLOCK;
        for (int i = 0; i < n; i += TILE) moments_tile(x, tensor, start + i, n - i < TILE ? n - i : TILE);
        const float *s = element(x, EXP_AVG_SQ, tensor, start, FLOAT32);
        x->sums[x->first_block[tensor] + b] = sum_block(n, s);
    }
}

/* The mean of sigma, and the level, in a fixed order. */
static void level_of(const Step *x, int64_t tensor) {
    if (x->clock && x->clock[tensor * CLOCK_COLUMNS + DUE] <= 0) return;
    double weight = weight_of(x, tensor), beta3 = beta3_of(x, tensor);
    double total = 0, count = 0;
    for (int64_t b = x->first_block[tensor]; b < x->first_block[tensor + 1]; b++) {
        total += x->sums[b].total;
        count += x->sums[b].count;
    }
    double mean = x->means[tensor] = count > 0 ? total / count / weight + x->eps : 0, level = x->levels[tensor];
    double mixed = level > 0 ? beta3 * level + (1 - beta3) * mean : mean;
    if (mean > 0) x->levels[tensor] = clamp(mixed, FLT_MIN, FLT_MAX);
}

/* The brake after this step, from the blocks' sums in a fixed order. */
static void brake_of(const Step *x, int64_t tensor) {
    float due = x->clock ? x->clock[tensor * CLOCK_COLUMNS + DUE] : x->due;
    float *brake = x->brakes + 3 * tensor;
    if (x->numels[tensor] < x->braked || due < 0) return;
    if (x->clock && !(x->clock[tensor * CLOCK_COLUMNS + GAMMA] > 0)) return;
    double power = 0;
    for (int64_t b = x->first_block[tensor]; b < x->first_block[tensor + 1]; b++) power += x->powers[b];
    power /= x->numels[tensor];
    if (due > 0) {
        double scale = scale_of(x->levels[tensor], x->new_gamma), typical = scale * scale;
        double foreseen = power > typical ? power : typical;
        brake[FORESEEN] = power > 0 && foreseen <= FLT_MAX ? foreseen : 0;
        brake[AVERAGE] = brake[FORESEEN];
        brake[EXCESS] = 1;
    } else {
        brake[AVERAGE] += (power - brake[AVERAGE]) * (1 - x->beta1);
        float ratio = brake[FORESEEN] > 0 ? brake[AVERAGE] / brake[FORESEEN] : 0;
        if (ratio > brake[EXCESS] && ratio <= FLT_MAX) brake[EXCESS] = ratio;
    }
}

/* Threads: each takes the next `grain` blocks until none are left. */

INLINE void work(Step *x, void (*blocks)(const Step *, int64_t, int64_t, int64_t)) {
    const int64_t n_blocks = x->first_block[x->n_tensors];
    int64_t tensor = 0, from;
    while ((from = __atomic_fetch_add(&x->next, x->grain, __ATOMIC_RELAXED)) < n_blocks) {
        int64_t to = from + x->grain < n_blocks ? from + x->grain : n_blocks;
        while (from < to) {
            while (x->first_block[tensor + 1] <= from) tensor++;
            int64_t first = x->first_block[tensor], last = x->first_block[tensor + 1];
            blocks(x, tensor, from - first, (to < last ? to : last) - first);
            from = last;
        }
    }
}

static void work_on_steps(void *x) { work(x, step_blocks); }
static void work_on_moments(void *x) { work(x, moments_blocks); }

/* All of torch's threads or one: a pool that is asked for fewer dismisses the others and must hire them again. */
static void share(Step *x, void (*worker)(void *)) {
    int alone = !x->parallel || x->threads < 2 || x->n_elements < SERIAL;
    int64_t fair = x->first_block[x->n_tensors] / (16 * x->threads);
    x->next = 0;
    x->grain = fair < 1 ? 1 : fair < GRAIN ? fair : GRAIN;
    if (alone)
        worker(x);
    else
        x->parallel(worker, x, x->threads, 0);
}

/* One step of the batch. `due` under a clock says that some tensor may be. */
void anon_step(Step *x) {
    if (x->due) {
        share(x, work_on_moments);
        for (int64_t tensor = 0; tensor < x->n_tensors; tensor++) level_of(x, tensor);
    }
    share(x, work_on_steps);
    for (int64_t tensor = 0; x->brake && tensor < x->n_tensors; tensor++) brake_of(x, tensor);
}

/* So that the caller can see that it means the same structure. */
int64_t anon_step_size(void) { return sizeof(Step); }

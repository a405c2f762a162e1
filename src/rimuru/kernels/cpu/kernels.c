/* The CPU back end's compute: what rimuru.kernels.reference defines, for bfloat16 and float32.
 *
 * Room: one translation unit, called through ctypes by ops.py. Rule: the value of an output row never
 * depends on the other rows of the batch, on the number of threads, or on where an operand lies. Every
 * reduction therefore runs in one fixed order, whatever tile computes it:
 *
 *   - A dot product over K keeps one vector accumulator. It takes blocks of KB = 2 * VW elements in order,
 *     first the block's `lo` half, then its `hi` half, and folds the lanes with one fixed tree (fold4).
 *   - Attention restarts its online softmax at fixed positions (segments) and merges them in order.
 *   - An expert's contributions are added by ascending expert id.
 *
 * A block of 2 * VW bfloat16 values is split into even elements (lo) and odd elements (hi): as VW 32-bit
 * words, `word << 16` and `word & 0xffff0000` are those values in float32, one instruction each and no
 * shuffle. Both operands of a product are split alike, so the order of K inside a block is immaterial to
 * the meaning. For float32, lo and hi are the block's first and second half.
 *
 * GCC vector extensions carry the arithmetic (x86 AVX2 and AVX-512, ARM NEON, or plain SSE).
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX2__)
#define VW 8
#else
#define VW 4
#endif
#define KB (2 * VW)  /* elements of one block */
#define MT 4         /* rows of x in the largest tile */
#define COLS 96      /* most weight rows of one work unit */
#define SEGMENT 512  /* tokens between restarts of the online softmax */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(2), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(VW * 4), aligned(2), may_alias));

INLINE size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
INLINE vf splat(float v) { return v - (vf){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* a * b + c in one rounding where the machine can. Spelt out, because a compiler that contracts at its own
 * discretion does so in one tile and not in another. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* ---- threads -------------------------------------------------------------------------------- */

typedef void (*worker_fn)(void *job);

static void run(int64_t threads, worker_fn worker, void *job) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
        worker(job);
        return;
    }
#endif
    (void)threads;
    worker(job);
}

static void barrier(void) {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

INLINE size_t claim(size_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* Two workers out of one generic body: the element type becomes a constant. */
#define FOR_BOTH_TYPES(name)                            \
    static void name##_bf16(void *job) { name(job, 1); } \
    static void name##_f32(void *job) { name(job, 0); }
#define PICK(name) (bf16 ? name##_bf16 : name##_f32)

/* ---- elements ------------------------------------------------------------------------------- */

INLINE size_t esize(int bf16) { return bf16 ? 2 : 4; }
INLINE const char *at(const void *p, size_t i, int bf16) { return (const char *)p + i * esize(bf16); }

INLINE float get(const void *p, size_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

INLINE uint16_t bf16_of(float v) { /* round to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &v, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

INLINE void put(void *p, size_t i, float v, int bf16) {
    if (bf16) ((uint16_t *)p)[i] = bf16_of(v);
    else ((float *)p)[i] = v;
}

INLINE float rounded(float v, int bf16) {
    if (!bf16) return v;
    uint16_t half = bf16_of(v);
    return get(&half, 0, 1);
}

INLINE vf load_half(const char *p, int hi, int bf16) {
    if (!bf16) return *(const vf_any *)(p + hi * sizeof(vf));
    vu raw = *(const vu_any *)p;
    return hi ? (vf)(raw & 0xffff0000u) : (vf)(raw << 16);
}

INLINE vf vround(vf v, int bf16) {
    if (!bf16) return v;
    vu bits = (vu)v;
    vu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return pick(v != v, splat(NAN), (vf)nearest);
}

/* One block of n <= KB elements in, the rest zero; one block out. */
INLINE void load_block(const char *p, size_t n, vf *lo, vf *hi, int bf16) {
    char tail[KB * 4];
    if (n < KB) {
        memset(tail, 0, sizeof tail);
        p = memcpy(tail, p, n * esize(bf16));
    }
    *lo = load_half(p, 0, bf16);
    *hi = load_half(p, 1, bf16);
}

INLINE void store_block(char *p, size_t n, vf lo, vf hi, int bf16) {
    char tail[KB * 4];
    char *to = n < KB ? tail : p;
    if (bf16) {
        *(vu_any *)to = ((vu)vround(lo, 1) >> 16) | (vu)vround(hi, 1);
    } else {
        *(vf_any *)to = lo;
        *(vf_any *)(to + sizeof(vf)) = hi;
    }
    if (n < KB) memcpy(p, tail, n * esize(bf16));
}

/* n elements to split float32, zero up to the next multiple of KB. */
INLINE void widen(const char *p, size_t n, float *out, int bf16) {
    for (size_t i = 0; i < n; i += KB) {
        vf lo, hi;
        load_block(p + i * esize(bf16), least(KB, n - i), &lo, &hi, bf16);
        *(vf_any *)(out + i) = lo;
        *(vf_any *)(out + i + VW) = hi;
    }
}

/* exp with a relative error below 2e-7; 0 below -87.3 (so exp(-inf) == 0), NaN stays NaN. */
INLINE vf vexp(vf x) {
    const vf shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf top = splat(88.3f), low = splat(-87.3f);
    vi under = x < low;
    x = pick(under, low, pick(x > top, top, x));
    vf t = x * 1.44269504f + shift;
    vf n = t - shift;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f); /* minimax on [-ln2/2, ln2/2] (Cephes expf) */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vu power = ((vu)t + (127u - 0x4b400000u)) << 23;
    return (vf)((vu)(p * (vf)power) & ~(vu)under);
}

INLINE vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

/* ---- the dot-product tile ------------------------------------------------------------------- */

/* The sums of four vectors' lanes, each by the same tree. */
INLINE void fold4(vf a, vf b, vf c, vf d, float *out) {
#if defined(__AVX__) && VW >= 8
#if VW == 16
#define HALVES(v) \
    _mm256_add_ps(_mm512_castps512_ps256((__m512)v), \
                  _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)))
#else
#define HALVES(v) ((__m256)v)
#endif
    __m256 ab = _mm256_hadd_ps(HALVES(a), HALVES(b)), cd = _mm256_hadd_ps(HALVES(c), HALVES(d));
    __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    const vf v[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

INLINE float fold(vf a) {
    float out[4];
    fold4(a, a, a, a, out);
    return out[0];
}

/* out[m * ldo + n] = dot(x[m], w[n]) for an MR x NR tile; x split float32, w in its own type. */
INLINE void dot_tile(const int MR, const int NR, const float *const *x, const char *w, size_t ldw, size_t k,
                     float *out, size_t ldo, int bf16) {
    vf acc[12];
    UNROLL for (int i = 0; i < MR * NR; i++) acc[i] = (vf){0};
    const size_t full = k / KB * KB, stride = ldw * esize(bf16);
    for (size_t i = 0; i < full; i += KB) {
        const char *p = w + i * esize(bf16);
        UNROLL for (int n = 0; n < NR; n++) __builtin_prefetch(p + (n + (NR < 8 ? 2 * NR : NR)) * stride);
        UNROLL for (int hi = 0; hi < 2; hi++) {
            vf b[8];
            UNROLL for (int n = 0; n < NR; n++) b[n] = load_half(p + n * stride, hi, bf16);
            UNROLL for (int m = 0; m < MR; m++) {
                vf a = *(const vf_any *)(x[m] + i + hi * VW);
                UNROLL for (int n = 0; n < NR; n++) acc[m * NR + n] = fused(a, b[n], acc[m * NR + n]);
            }
        }
    }
    if (full < k) {
        UNROLL for (int n = 0; n < NR; n++) {
            vf lo, hi; /* through a buffer: a row's neighbour may be NaN or unmapped */
            load_block(w + n * stride + full * esize(bf16), k - full, &lo, &hi, bf16);
            UNROLL for (int m = 0; m < MR; m++) {
                acc[m * NR + n] = fused(*(const vf_any *)(x[m] + full), lo, acc[m * NR + n]);
                acc[m * NR + n] = fused(*(const vf_any *)(x[m] + full + VW), hi, acc[m * NR + n]);
            }
        }
    }
    UNROLL for (int i = 0; i < MR * NR; i += 4) {
        float s[4];
        fold4(acc[i], acc[i + 1 < MR * NR ? i + 1 : i], acc[i + 2 < MR * NR ? i + 2 : i],
              acc[i + 3 < MR * NR ? i + 3 : i], s);
        UNROLL for (int j = 0; j < 4; j++)
            if (i + j < MR * NR) out[(i + j) / NR * ldo + (i + j) % NR] = s[j];
    }
}

#define DOT_ROWS(MR, NR, TYPE, BF16)                                                                       \
    static __attribute__((noinline)) void dot_##MR##TYPE(const float *const *x, const char *w, size_t ldw, \
                                                          size_t n, size_t k, float *out, size_t ldo) {    \
        size_t j = 0;                                                                                      \
        for (; j + NR <= n; j += NR) dot_tile(MR, NR, x, at(w, j * ldw, BF16), ldw, k, out + j, ldo, BF16); \
        for (; j < n; j++) dot_tile(MR, 1, x, at(w, j * ldw, BF16), ldw, k, out + j, ldo, BF16);           \
    }
/* 8 to 12 accumulators cover the latency of the multiply-add and fit in 16 registers. */
DOT_ROWS(1, 8, _bf16, 1) DOT_ROWS(2, 6, _bf16, 1) DOT_ROWS(3, 4, _bf16, 1) DOT_ROWS(4, 3, _bf16, 1)
DOT_ROWS(1, 8, _f32, 0) DOT_ROWS(2, 6, _f32, 0) DOT_ROWS(3, 4, _f32, 0) DOT_ROWS(4, 3, _f32, 0)

typedef void (*dot_fn)(const float *const *, const char *, size_t, size_t, size_t, float *, size_t);

/* rows <= MT rows of x against n rows of w: out [rows, ldo]. */
INLINE void dot_rows(size_t rows, const float *const *x, const char *w, size_t ldw, size_t n, size_t k, float *out,
                     size_t ldo, int bf16) {
    static const dot_fn table[2][MT] = {{dot_1_f32, dot_2_f32, dot_3_f32, dot_4_f32},
                                        {dot_1_bf16, dot_2_bf16, dot_3_bf16, dot_4_bf16}};
    table[bf16][rows - 1](x, w, ldw, n, k, out, ldo);
}

/* Weight rows of a work unit: about 128 KiB, so that they stay in L2 while x's rows pass over them. */
INLINE size_t unit_cols(size_t k, int bf16) {
    size_t n = 131072 / (k * esize(bf16)) / 24 * 24;
    return n < 24 ? 24 : least(n, COLS);
}

static void *scratch(size_t bytes) { return aligned_alloc(64, round_up(bytes + 64, 64)); }

/* ---- linear --------------------------------------------------------------------------------- */

typedef struct {
    const char *x, *w, *bias;
    char *out;
    float *wide; /* [threads, MT, round_up(k, KB)] */
    size_t ldx, m, n, k, next, worker;
} linear_job;

INLINE void linear_body(void *arg, int bf16) {
    linear_job *j = arg;
    const size_t kp = round_up(j->k, KB), cols = unit_cols(j->k, bf16), block = 64;
    const size_t across = (j->n + cols - 1) / cols, units = across * ((j->m + block - 1) / block);
    float *wide = j->wide + claim(&j->worker) * MT * kp, sums[MT * COLS];
    const float *rows[MT];
    for (size_t i = 0; i < MT; i++) rows[i] = wide + i * kp;
    for (size_t u; (u = claim(&j->next)) < units;) {
        const size_t n0 = u % across * cols, n = least(cols, j->n - n0);
        const size_t first = u / across * block, last = least(first + block, j->m);
        for (size_t m0 = first; m0 < last; m0 += MT) {
            const size_t m = least(MT, last - m0);
            for (size_t i = 0; i < m; i++) widen(at(j->x, (m0 + i) * j->ldx, bf16), j->k, wide + i * kp, bf16);
            dot_rows(m, rows, at(j->w, n0 * j->k, bf16), j->k, n, j->k, sums, COLS, bf16);
            for (size_t i = 0; i < m; i++) {
                float *sum = sums + i * COLS;
                if (j->bias)
                    for (size_t c = 0; c < n; c++) sum[c] += get(j->bias, n0 + c, bf16);
                char *to = (char *)at(j->out, (m0 + i) * j->n + n0, bf16);
                for (size_t c = 0; c < n; c++) put(to, c, sum[c], bf16);
            }
        }
    }
}
FOR_BOTH_TYPES(linear_body)

int rimuru_linear(const void *x, int64_t ldx, const void *w, const void *bias, void *out, int64_t m, int64_t n,
                  int64_t k, int64_t bf16, int64_t threads) {
    linear_job job = {.x = x, .w = w, .bias = bias, .out = out, .ldx = ldx, .m = m, .n = n, .k = k};
    if (m * n * k < 1 << 15) threads = 1;
    job.wide = scratch(threads * MT * round_up(k, KB) * sizeof(float));
    if (!job.wide) return -1;
    run(threads, PICK(linear_body), &job);
    free(job.wide);
    return 0;
}

/* ---- experts -------------------------------------------------------------------------------- */

typedef struct {
    const char *x;
    char *out;
    const int32_t *ids;
    const float *weights;
    const int64_t *table;
    const char *shared, *gate; /* [tokens, hidden] ld lds, [tokens]; either may be NULL */
    size_t lds, ldx, tokens, top_k, experts, hidden, inter, down_offset;
    size_t *start;     /* [experts + 1] into entry */
    int32_t *entry;    /* [tokens * top_k] flat index into ids, grouped by expert, tokens ascending */
    int32_t *busy;     /* experts that have entries, ascending */
    size_t busy_count;
    char *act;         /* [tokens * top_k, inter], in entry's order */
    float *sum;        /* [tokens, hidden] */
    float *wide;       /* [threads, MT, round_up(max(hidden, inter), KB)] */
    size_t next_up, next_down, worker;
} moe_job;

/* The low byte of a table entry is a tag (types.EXPERT_ADDRESS). */
INLINE const char *expert_at(const moe_job *j, size_t e) { return (const char *)(uintptr_t)(j->table[e] & ~0xff); }

/* act = silu(gate) * up for one expert and `n` of its intermediate columns. */
INLINE void moe_up(moe_job *j, size_t e, size_t n0, size_t n, float *wide, int bf16) {
    const size_t kp = round_up(j->hidden, KB), h = j->hidden;
    const char *gate = at(expert_at(j, e), n0 * h, bf16), *up = at(gate, j->inter * h, bf16);
    float g[MT * COLS], u[MT * COLS];
    const float *rows[MT];
    for (size_t i = 0; i < MT; i++) rows[i] = wide + i * kp;
    for (size_t r = j->start[e]; r < j->start[e + 1]; r += MT) {
        const size_t m = least(MT, j->start[e + 1] - r);
        for (size_t i = 0; i < m; i++)
            widen(at(j->x, j->entry[r + i] / j->top_k * j->ldx, bf16), h, wide + i * kp, bf16);
        dot_rows(m, rows, gate, h, n, h, g, COLS, bf16);
        dot_rows(m, rows, up, h, n, h, u, COLS, bf16);
        for (size_t i = 0; i < m; i++) {
            float *a = g + i * COLS, *b = u + i * COLS;
            for (size_t c = 0; c < n; c += VW) { /* COLS is a multiple of VW: the lanes past n are scratch */
                vf left = vround(*(vf_any *)(a + c), bf16), right = vround(*(vf_any *)(b + c), bf16);
                *(vf_any *)(a + c) = vsilu(left) * right;
            }
            char *to = (char *)at(j->act, (r + i) * j->inter + n0, bf16);
            for (size_t c = 0; c < n; c++) put(to, c, a[c], bf16);
        }
    }
}

/* The weighted sum over experts for `n` hidden columns of every token. */
INLINE void moe_down(moe_job *j, size_t n0, size_t n, float *wide, int bf16) {
    const size_t k = j->inter, kp = round_up(k, KB), h = j->hidden;
    float y[MT * COLS];
    const float *rows[MT];
    for (size_t i = 0; i < MT; i++) rows[i] = wide + i * kp;
    for (size_t t = 0; t < j->tokens; t++) memset(j->sum + t * h + n0, 0, n * sizeof(float));
    for (size_t b = 0; b < j->busy_count; b++) {
        const size_t e = j->busy[b];
        const char *down = at(expert_at(j, e) + j->down_offset, n0 * k, bf16);
        for (size_t r = j->start[e]; r < j->start[e + 1]; r += MT) {
            const size_t m = least(MT, j->start[e + 1] - r);
            for (size_t i = 0; i < m; i++) widen(at(j->act, (r + i) * k, bf16), k, wide + i * kp, bf16);
            dot_rows(m, rows, down, k, n, k, y, COLS, bf16);
            for (size_t i = 0; i < m; i++) {
                const float weight = j->weights[j->entry[r + i]];
                float *sum = j->sum + j->entry[r + i] / j->top_k * h + n0;
                for (size_t c = 0; c < n; c++) sum[c] += weight * rounded(y[i * COLS + c], bf16);
            }
        }
    }
    for (size_t t = 0; t < j->tokens; t++) {
        float *sum = j->sum + t * h;
        if (j->shared) {
            const float scale = j->gate ? 1.0f / (1.0f + expf(-get(j->gate, t, bf16))) : 1.0f;
            for (size_t c = n0; c < n0 + n; c++) sum[c] += scale * get(j->shared, t * j->lds + c, bf16);
        }
        for (size_t c = n0; c < n0 + n; c++) put(j->out, t * h + c, sum[c], bf16);
    }
}

INLINE void moe_body(void *arg, int bf16) {
    moe_job *j = arg;
    const size_t widest = j->hidden > j->inter ? j->hidden : j->inter;
    float *wide = j->wide + claim(&j->worker) * MT * round_up(widest, KB);
    size_t cols = unit_cols(2 * j->hidden, bf16), across = (j->inter + cols - 1) / cols, u;
    while ((u = claim(&j->next_up)) < across * j->busy_count) {
        const size_t n0 = u % across * cols;
        moe_up(j, j->busy[u / across], n0, least(cols, j->inter - n0), wide, bf16);
    }
    barrier();
    cols = unit_cols(j->inter, bf16), across = (j->hidden + cols - 1) / cols;
    while ((u = claim(&j->next_down)) < across) moe_down(j, u * cols, least(cols, j->hidden - u * cols), wide, bf16);
}
FOR_BOTH_TYPES(moe_body)

/* Sort the entries by expert (counting sort, stable). Ids outside [0, experts) are skipped. */
static void moe_group(moe_job *j, int32_t *touched) {
    const size_t entries = j->tokens * j->top_k;
    memset(j->start, 0, (j->experts + 1) * sizeof(size_t));
    for (size_t i = 0; i < entries; i++)
        if ((uint32_t)j->ids[i] < j->experts) j->start[j->ids[i] + 1]++;
    j->busy_count = 0;
    for (size_t e = 0; e < j->experts; e++) {
        if (touched) touched[e] += (int32_t)j->start[e + 1];
        if (j->start[e + 1]) j->busy[j->busy_count++] = (int32_t)e;
        j->start[e + 1] += j->start[e];
    }
    for (size_t i = 0; i < entries; i++)
        if ((uint32_t)j->ids[i] < j->experts) j->entry[j->start[j->ids[i]]++] = (int32_t)i;
    memmove(j->start + 1, j->start, j->experts * sizeof(size_t)); /* each start had moved to the next one's */
    j->start[0] = 0;
}

int rimuru_moe(const void *x, int64_t ldx, const int32_t *ids, const float *weights, const int64_t *table,
               int32_t *touched, const void *shared, int64_t lds, const void *gate, void *out, int64_t tokens,
               int64_t top_k, int64_t experts, int64_t hidden, int64_t inter, int64_t down_offset, int64_t bf16,
               int64_t threads) {
    const size_t chunk = least(tokens, 512), entries = chunk * top_k; /* bounds the scratch of a long prefill */
    const size_t widest = round_up(hidden > inter ? hidden : inter, KB);
    const size_t parts[] = {(experts + 1) * sizeof(size_t), entries * 4, experts * 4, entries * inter * esize(bf16),
                            chunk * hidden * 4, threads * MT * widest * 4};
    size_t total = 0, offset[6];
    for (int i = 0; i < 6; i++) offset[i] = total, total += round_up(parts[i], 64);
    char *space = scratch(total);
    if (!space) return -1;
    for (int64_t t = 0; t < tokens; t += 512) {
        moe_job job = {.x = at(x, t * ldx, bf16), .out = (char *)at(out, t * hidden, bf16), .ids = ids + t * top_k,
                       .weights = weights + t * top_k, .table = table, .ldx = ldx, .tokens = least(512, tokens - t),
                       .shared = shared ? at(shared, t * lds, bf16) : NULL, .lds = lds,
                       .gate = gate ? at(gate, t, bf16) : NULL,
                       .top_k = top_k, .experts = experts, .hidden = hidden, .inter = inter,
                       .down_offset = down_offset, .start = (size_t *)(space + offset[0]),
                       .entry = (int32_t *)(space + offset[1]), .busy = (int32_t *)(space + offset[2]),
                       .act = space + offset[3], .sum = (float *)(space + offset[4]),
                       .wide = (float *)(space + offset[5])};
        moe_group(&job, touched);
        run(job.tokens * top_k * hidden * inter < 1 << 14 ? 1 : threads, PICK(moe_body), &job);
    }
    free(space);
    return 0;
}

/* ---- row-wise operations -------------------------------------------------------------------- */

/* RMSNorm of one row; `sum` (x + residual) is written where there is a residual. row: [round_up(n, KB)]. */
INLINE void norm_row(const char *x, const char *residual, const char *weight, size_t n, float eps, char *out,
                     char *sum, float *row, int bf16) {
    vf squares = {0};
    for (size_t i = 0; i < n; i += KB) {
        const size_t left = least(KB, n - i), byte = i * esize(bf16);
        vf lo, hi;
        load_block(x + byte, left, &lo, &hi, bf16);
        if (residual) {
            vf rlo, rhi;
            load_block(residual + byte, left, &rlo, &rhi, bf16);
            lo = vround(lo + rlo, bf16), hi = vround(hi + rhi, bf16);
            store_block(sum + byte, left, lo, hi, bf16);
        }
        squares += lo * lo;
        squares += hi * hi;
        *(vf_any *)(row + i) = lo;
        *(vf_any *)(row + i + VW) = hi;
    }
    const float scale = 1.0f / sqrtf(fold(squares) / (float)n + eps);
    for (size_t i = 0; i < n; i += KB) {
        const size_t left = least(KB, n - i), byte = i * esize(bf16);
        vf lo, hi;
        load_block(weight + byte, left, &lo, &hi, bf16);
        lo *= vround(*(vf_any *)(row + i) * scale, bf16);
        hi *= vround(*(vf_any *)(row + i + VW) * scale, bf16);
        store_block(out + byte, left, lo, hi, bf16);
    }
}

typedef struct {
    const char *x, *residual, *weight;
    char *out, *sum;
    float *row; /* [threads, round_up(n, KB)] */
    size_t ldx, ldr, m, n, next, worker;
    float eps;
} norm_job;

INLINE void norm_body(void *arg, int bf16) {
    norm_job *j = arg;
    float *row = j->row + claim(&j->worker) * round_up(j->n, KB);
    for (size_t r; (r = claim(&j->next)) < j->m;)
        norm_row(at(j->x, r * j->ldx, bf16), j->residual ? at(j->residual, r * j->ldr, bf16) : NULL, j->weight, j->n,
                 j->eps, (char *)at(j->out, r * j->n, bf16), (char *)at(j->sum, r * j->n, bf16), row, bf16);
}
FOR_BOTH_TYPES(norm_body)

int rimuru_rms_norm(const void *x, int64_t ldx, const void *residual, int64_t ldr, const void *weight, void *out,
                    void *sum, int64_t m, int64_t n, double eps, int64_t bf16, int64_t threads) {
    norm_job job = {.x = x, .residual = residual, .weight = weight, .out = out, .sum = sum, .ldx = ldx, .ldr = ldr,
                    .m = m, .n = n, .eps = (float)eps};
    if (m * n < 1 << 15) threads = 1;
    if (!(job.row = scratch(threads * round_up(n, KB) * sizeof(float)))) return -1;
    run(threads, PICK(norm_body), &job);
    free(job.row);
    return 0;
}

typedef struct {
    const char *x;
    char *out;
    size_t ldx, m, n, next;
} silu_job;

INLINE void silu_body(void *arg, int bf16) {
    silu_job *j = arg;
    for (size_t r; (r = claim(&j->next)) < j->m;) {
        const char *gate = at(j->x, r * j->ldx, bf16), *up = at(gate, j->n, bf16);
        char *out = (char *)at(j->out, r * j->n, bf16);
        for (size_t i = 0; i < j->n; i += KB) {
            const size_t left = least(KB, j->n - i), byte = i * esize(bf16);
            vf glo, ghi, ulo, uhi;
            load_block(gate + byte, left, &glo, &ghi, bf16);
            load_block(up + byte, left, &ulo, &uhi, bf16);
            store_block(out + byte, left, vsilu(glo) * ulo, vsilu(ghi) * uhi, bf16);
        }
    }
}
FOR_BOTH_TYPES(silu_body)

void rimuru_silu_and_mul(const void *x, int64_t ldx, void *out, int64_t m, int64_t n, int64_t bf16,
                         int64_t threads) {
    silu_job job = {.x = x, .out = out, .ldx = ldx, .m = m, .n = n};
    run(m * n < 1 << 15 ? 1 : threads, PICK(silu_body), &job);
}

typedef struct {
    const char *logits;
    const float *bias;
    float *weights, *space; /* space: [threads, 2 * padded] */
    int32_t *ids;
    size_t ld, m, experts, padded, top_k, next, worker;
    int sigmoid, normalize;
} route_job;

INLINE void route_body(void *arg, int bf16) {
    route_job *j = arg;
    float *score = j->space + claim(&j->worker) * 2 * j->padded, *choice = score + j->padded;
    for (size_t r; (r = claim(&j->next)) < j->m;) {
        float top = -INFINITY, total = 0;
        for (size_t e = 0; e < j->experts; e++) {
            score[e] = get(j->logits, r * j->ld + e, bf16);
            top = score[e] > top ? score[e] : top;
        }
        for (size_t e = 0; e < j->padded; e += VW) {
            vf v = *(vf_any *)(score + e);
            *(vf_any *)(score + e) = j->sigmoid ? 1.0f / (1.0f + vexp(-v)) : vexp(v - top);
        }
        if (!j->sigmoid) {
            for (size_t e = 0; e < j->experts; e++) total += score[e];
            for (size_t e = 0; e < j->experts; e++) score[e] /= total;
        }
        for (size_t e = 0; e < j->experts; e++) {
            choice[e] = j->bias ? score[e] + j->bias[e] : score[e];
            if (!(choice[e] >= -3e38f)) choice[e] = -3e38f; /* NaN still yields k distinct ids */
        }
        float *weights = j->weights + r * j->top_k, sum = 0;
        for (size_t k = 0; k < j->top_k; k++) {
            size_t best = 0;
            for (size_t e = 1; e < j->experts; e++)
                if (choice[e] > choice[best]) best = e;
            choice[best] = -INFINITY;
            j->ids[r * j->top_k + k] = (int32_t)best;
            sum += weights[k] = score[best];
        }
        if (j->normalize)
            for (size_t k = 0; k < j->top_k; k++) weights[k] /= sum < 1e-20f ? 1e-20f : sum;
    }
}
FOR_BOTH_TYPES(route_body)

int rimuru_route(const void *logits, int64_t ld, const float *bias, float *weights, int32_t *ids, int64_t m,
                 int64_t experts, int64_t top_k, int64_t sigmoid, int64_t normalize, int64_t bf16, int64_t threads) {
    route_job job = {.logits = logits, .bias = bias, .weights = weights, .ids = ids, .ld = ld, .m = m,
                     .experts = experts, .padded = round_up(experts, VW), .top_k = top_k, .sigmoid = (int)sigmoid,
                     .normalize = (int)normalize};
    if (m * experts < 1 << 12) threads = 1;
    const size_t bytes = threads * 2 * job.padded * sizeof(float);
    if (!(job.space = scratch(bytes))) return -1;
    memset(job.space, 0, bytes);
    run(threads, PICK(route_body), &job);
    free(job.space);
    return 0;
}

/* ---- the KV cache --------------------------------------------------------------------------- */

typedef struct { /* one attention layer's window on the pool; counts in elements */
    char *pool;
    const int32_t *table;
    size_t table_stride, block, heads, dim, grain, layer, kv;
} cache_view;

INLINE char *token_at(const cache_view *c, size_t slot, size_t position, int bf16) {
    const size_t page = (size_t)c->table[slot * c->table_stride + position / c->block];
    return (char *)at(c->pool, page * c->grain + c->layer + position % c->block * c->heads * c->dim, bf16);
}

typedef struct {
    const char *qkv, *q_norm, *k_norm;
    char *q, *temp; /* temp: [threads, (q_heads + kv heads) * dim] */
    float *row;     /* [threads, the same, rounded up] */
    const int32_t *positions, *slots;
    const float *rope;
    cache_view cache;
    size_t ld, tokens, q_heads, rotary, next, worker;
    int q_norm_all, k_norm_all;
    float eps;
} qkv_job;

/* `heads` heads of one token: normalised, turned, written to `out`. */
INLINE void turn(const qkv_job *j, const char *x, size_t heads, const char *weight, int all, const float *cs,
                 char *temp, float *row, char *out, int bf16) {
    const size_t dim = j->cache.dim, half = j->rotary / 2;
    if (weight && all) norm_row(x, NULL, weight, heads * dim, j->eps, temp, NULL, row, bf16);
    else if (weight)
        for (size_t h = 0; h < heads; h++)
            norm_row(at(x, h * dim, bf16), NULL, weight, dim, j->eps, temp + h * dim * esize(bf16), NULL, row, bf16);
    if (weight) x = temp;
    for (size_t h = 0; h < heads; h++, x = at(x, dim, bf16), out = (char *)at(out, dim, bf16)) {
        for (size_t i = 0; i < half; i++) {
            const float a = get(x, i, bf16), b = get(x, i + half, bf16), c = cs[i], s = cs[i + half];
            put(out, i, a * c - b * s, bf16);
            put(out, i + half, b * c + a * s, bf16);
        }
        memcpy((char *)at(out, 2 * half, bf16), at(x, 2 * half, bf16), (dim - 2 * half) * esize(bf16));
    }
}

INLINE void qkv_body(void *arg, int bf16) {
    qkv_job *j = arg;
    const size_t dim = j->cache.dim, kv_heads = j->cache.heads, me = claim(&j->worker);
    const size_t widest = (j->q_heads + kv_heads) * dim;
    char *temp = j->temp + me * widest * 4;
    float *row = j->row + me * round_up(widest, KB);
    for (size_t t; (t = claim(&j->next)) < j->tokens;) {
        const char *q = at(j->qkv, t * j->ld, bf16), *k = at(q, j->q_heads * dim, bf16);
        const float *cs = j->rope + (size_t)j->positions[t] * j->rotary;
        turn(j, q, j->q_heads, j->q_norm, j->q_norm_all, cs, temp, row,
             (char *)at(j->q, t * j->q_heads * dim, bf16), bf16);
        if (j->slots[t] < 0) continue;
        char *to = token_at(&j->cache, j->slots[t], j->positions[t], bf16);
        turn(j, k, kv_heads, j->k_norm, j->k_norm_all, cs, temp, row, to, bf16);
        memcpy((char *)at(to, j->cache.kv, bf16), at(k, kv_heads * dim, bf16), kv_heads * dim * esize(bf16));
    }
}
FOR_BOTH_TYPES(qkv_body)

int rimuru_qkv_to_cache(const void *qkv, int64_t ld, void *q, void *pool, const int32_t *table, int64_t table_stride,
                        const int32_t *positions, const int32_t *slots, const float *rope, const void *q_norm,
                        const void *k_norm, int64_t norm_all, int64_t tokens, int64_t q_heads, int64_t heads,
                        int64_t dim, int64_t block, int64_t grain, int64_t layer, int64_t kv, int64_t rotary,
                        double eps, int64_t bf16, int64_t threads) {
    qkv_job job = {.qkv = qkv, .q_norm = q_norm, .k_norm = k_norm, .q = q, .positions = positions, .slots = slots,
                   .rope = rope, .ld = ld, .tokens = tokens, .q_heads = q_heads, .rotary = rotary,
                   .q_norm_all = norm_all & 1, .k_norm_all = norm_all >> 1, .eps = (float)eps,
                   .cache = {pool, table, table_stride, block, heads, dim, grain, layer, kv}};
    const size_t widest = round_up((q_heads + heads) * dim, KB);
    if (tokens < 32) threads = 1;
    if (!(job.row = scratch(threads * widest * 8))) return -1;
    job.temp = (char *)(job.row + threads * widest);
    run(threads, PICK(qkv_body), &job);
    free(job.row);
    return 0;
}

typedef struct {
    const char *q;
    char *out;
    const int32_t *query_start, *slots, *seq_lens;
    cache_view cache;
    size_t seqs, group, q_block, q_blocks, segment, segments, window, ldq;
    size_t per_worker, next, next_merge, worker;
    float scale;
    float *space, *partial; /* partial: [seqs, kv heads, segments, part_floats(group)] when split */
    int split;
} attention_job;

/* A part is the state of an online softmax over some rows: max [rows], sum [rows], acc [rows, padded dim]. */
INLINE size_t part_floats(const attention_job *j, size_t rows) { return rows * (2 + round_up(j->cache.dim, KB)); }

typedef struct { /* the queries of one unit: `rows` = queries x group, the first query at `position` */
    const float *const *q;
    size_t rows, head, slot, position;
} query_rows;

/* acc = acc * keep + sum over tokens [lo, hi) of p[t] * v[t], for N vectors of the head's dimension. */
INLINE void add_values(const int N, float *acc, float keep, const float *p, const float *v, size_t ldv, size_t lo,
                       size_t hi) {
    vf a[8];
    UNROLL for (int i = 0; i < N; i++) a[i] = *(vf_any *)(acc + i * VW) * keep;
    for (size_t t = lo; t < hi; t++)
        UNROLL for (int i = 0; i < N; i++) a[i] = fused(splat(p[t]), *(const vf_any *)(v + t * ldv + i * VW), a[i]);
    UNROLL for (int i = 0; i < N; i++) *(vf_any *)(acc + i * VW) = a[i];
}

/* Softmax state of `rows` over the tokens [from, to), which lie in one segment. */
INLINE void attend_segment(const attention_job *j, const query_rows *u, size_t from, size_t to, float *part,
                           float *space, int bf16) {
    const cache_view *c = &j->cache;
    const size_t dp = round_up(c->dim, KB), sp = round_up(c->block, VW), ld = c->heads * c->dim;
    float *top = part, *sum = part + u->rows, *acc = sum + u->rows, *score = space, *v = score + u->rows * sp;
    for (size_t r = 0; r < u->rows; r++) top[r] = -INFINITY, sum[r] = 0;
    memset(acc, 0, u->rows * dp * sizeof(float));
    for (size_t t0 = from / c->block * c->block; t0 < to; t0 += c->block) {
        const size_t n = least(c->block, to - t0), skip = from > t0 ? from - t0 : 0;
        const char *keys = token_at(c, u->slot, t0 + skip, bf16) + u->head * c->dim * esize(bf16);
        for (size_t r = 0; r < u->rows; r += MT)
            dot_rows(least(MT, u->rows - r), u->q + r, keys, ld, n - skip, c->dim, score + r * sp + skip, sp, bf16);
        for (size_t t = skip; t < n; t++) widen(at(keys, c->kv + (t - skip) * ld, bf16), c->dim, v + t * dp, bf16);
        for (size_t r = 0; r < u->rows; r++) {
            const size_t position = u->position + r / j->group; /* sees (position - window, position] */
            const size_t low = j->window && position + 1 > j->window ? position + 1 - j->window : 0;
            const size_t lo = low > t0 + skip ? low - t0 : skip;
            if (position < t0 || lo >= least(n, position + 1 - t0)) continue;
            const size_t hi = least(n, position + 1 - t0);
            float *s = score + r * sp, *a = acc + r * dp, best = top[r];
            for (size_t t = 0; t < sp; t++) s[t] = t >= lo && t < hi ? s[t] * j->scale : -INFINITY;
            for (size_t t = lo; t < hi; t++) best = s[t] > best ? s[t] : best;
            const float keep = top[r] == best ? 1.0f : expf(top[r] - best);
            top[r] = best;
            vf mass = {0};
            for (size_t t = 0; t < sp; t += VW) mass += *(vf_any *)(s + t) = vexp(*(vf_any *)(s + t) - best);
            sum[r] = sum[r] * keep + fold(mass);
            size_t d = 0;
            for (; d + 8 * VW <= dp; d += 8 * VW) add_values(8, a + d, keep, s, v + d, dp, lo, hi);
            for (; d < dp; d += 2 * VW) add_values(2, a + d, keep, s, v + d, dp, lo, hi);
        }
    }
}

INLINE void merge_part(const attention_job *j, size_t rows, float *total, const float *part) {
    const size_t dp = round_up(j->cache.dim, KB);
    for (size_t r = 0; r < rows; r++) {
        if (part[r] == -INFINITY) continue;
        const float best = part[r] > total[r] ? part[r] : total[r];
        const float keep = expf(total[r] - best), add = expf(part[r] - best);
        float *a = total + 2 * rows + r * dp;
        const float *b = part + 2 * rows + r * dp;
        total[r] = best;
        total[rows + r] = total[rows + r] * keep + part[rows + r] * add;
        for (size_t d = 0; d < dp; d += VW)
            *(vf_any *)(a + d) = *(vf_any *)(a + d) * keep + *(const vf_any *)(b + d) * add;
    }
}

INLINE void clear_part(const attention_job *j, size_t rows, float *part) {
    memset(part, 0, part_floats(j, rows) * sizeof(float));
    for (size_t r = 0; r < rows; r++) part[r] = -INFINITY;
}

INLINE void write_rows(const attention_job *j, const query_rows *u, size_t token, const float *part, int bf16) {
    const size_t dim = j->cache.dim, dp = round_up(dim, KB), width = j->cache.heads * j->group * dim;
    for (size_t r = 0; r < u->rows; r++) {
        char *to = (char *)at(j->out, (token + r / j->group) * width + (u->head * j->group + r % j->group) * dim, bf16);
        const float scale = 1.0f / part[u->rows + r], *a = part + 2 * u->rows + r * dp;
        for (size_t d = 0; d < dim; d += KB)
            store_block(to + d * esize(bf16), least(KB, dim - d), *(const vf_any *)(a + d) * scale,
                        *(const vf_any *)(a + d + VW) * scale, bf16);
    }
}

INLINE void attention_body(void *arg, int bf16) {
    attention_job *j = arg;
    const cache_view *c = &j->cache;
    const size_t dp = round_up(c->dim, KB), max_rows = j->q_block * j->group;
    float *q = j->space + claim(&j->worker) * j->per_worker, *total = q + max_rows * dp;
    float *part = total + part_floats(j, max_rows), *space = part + part_floats(j, max_rows);
    const float *rows[max_rows];
    for (size_t r = 0; r < max_rows; r++) rows[r] = q + r * dp;
    const size_t segments = j->split ? j->segments : 1, units = j->seqs * c->heads * j->q_blocks * segments;
    for (size_t claimed; (claimed = claim(&j->next)) < units;) {
        size_t i = units - 1 - claimed; /* the longest causal blocks first */
        const size_t seg = i % segments, head = i / segments % c->heads, s = i / segments / c->heads % j->seqs;
        const size_t q0 = i / segments / c->heads / j->seqs * j->q_block;
        const size_t first = j->query_start[s], queries = j->query_start[s + 1] - first, len = j->seq_lens[s];
        if (q0 >= queries || len == 0) continue;
        const size_t count = least(j->q_block, queries - q0), position = len - queries + q0;
        const query_rows u = {rows, count * j->group, head, j->slots[s], position};
        const size_t to = position + count; /* one past the last row's position */
        const size_t low = j->window && position + 1 > j->window ? position + 1 - j->window : 0;
        for (size_t r = 0; r < u.rows; r++)
            widen(at(j->q, (first + q0 + r / j->group) * j->ldq + (head * j->group + r % j->group) * c->dim, bf16),
                  c->dim, q + r * dp, bf16);
        if (j->split) {
            const size_t a = seg * j->segment, b = least(a + j->segment, to), from = low > a ? low : a;
            float *mine = j->partial + ((s * c->heads + head) * j->segments + seg) * part_floats(j, u.rows);
            if (from < b) attend_segment(j, &u, from, b, mine, space, bf16);
            else clear_part(j, u.rows, mine);
            continue;
        }
        clear_part(j, u.rows, total);
        for (size_t a = low / j->segment * j->segment; a < to; a += j->segment) {
            attend_segment(j, &u, low > a ? low : a, least(a + j->segment, to), part, space, bf16);
            merge_part(j, u.rows, total, part);
        }
        write_rows(j, &u, first + q0, total, bf16);
    }
    if (!j->split) return;
    barrier();
    for (size_t i; (i = claim(&j->next_merge)) < j->seqs * c->heads;) {
        const size_t s = i / c->heads, first = j->query_start[s];
        if (j->seq_lens[s] == 0 || j->query_start[s + 1] == (int32_t)first) continue;
        const query_rows u = {rows, j->group, i % c->heads, 0, 0};
        clear_part(j, u.rows, total);
        for (size_t seg = 0; seg < j->segments; seg++)
            merge_part(j, u.rows, total, j->partial + (i * j->segments + seg) * part_floats(j, u.rows));
        write_rows(j, &u, first, total, bf16);
    }
}
FOR_BOTH_TYPES(attention_body)

/* `out` [tokens, q_heads * dim] holds zeros where a sequence has no tokens. */
int rimuru_attention(const void *q, int64_t ldq, void *out, void *pool, const int32_t *table, int64_t table_stride,
                     const int32_t *query_start, const int32_t *slots, const int32_t *seq_lens, int64_t seqs,
                     int64_t max_query, int64_t max_seq, int64_t q_heads, int64_t heads, int64_t dim, int64_t block,
                     int64_t grain, int64_t layer, int64_t kv, int64_t window, double scale, int64_t bf16,
                     int64_t threads) {
    attention_job j = {.q = q, .out = out, .query_start = query_start, .slots = slots, .seq_lens = seq_lens,
                       .cache = {pool, table, table_stride, block, heads, dim, grain, layer, kv}, .seqs = seqs,
                       .group = q_heads / heads, .window = window, .ldq = ldq, .scale = (float)scale};
    if (seqs == 0 || max_query == 0) return 0;
    const size_t dp = round_up(dim, KB), wanted = 32 / j.group; /* about 32 rows share each page they read */
    j.q_block = least(wanted ? wanted : 1, max_query);
    j.q_blocks = (max_query + j.q_block - 1) / j.q_block;
    j.segment = round_up(SEGMENT, block);
    j.segments = (max_seq + j.segment - 1) / j.segment;
    j.split = max_query == 1 && j.segments > 1 && seqs * heads < 8 * threads;
    const size_t rows = j.q_block * j.group;
    j.per_worker = round_up(rows * dp + 2 * part_floats(&j, rows) + rows * round_up(block, VW) + block * dp, 16);
    if (seqs * heads * max_query * max_seq < 256) threads = 1;
    const size_t parts = j.split ? seqs * heads * j.segments * part_floats(&j, j.group) : 0;
    if (!(j.space = scratch((threads * j.per_worker + parts) * sizeof(float)))) return -1;
    j.partial = j.space + threads * j.per_worker;
    run(threads, PICK(attention_body), &j);
    free(j.space);
    return 0;
}

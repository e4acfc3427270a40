/* One forward pass of a DeepSeek-V3-form model over a flat list of new tokens, in float32 on one thread.
 *
 * Every output element is a sum in one fixed order that depends on nothing but its own row, so a row's result is the same bit
 * for bit in any batch and however its prompt was chunked. Weights come packed in panels: [out / 16][in][16].
 *
 * Compiled when first used (base/native/build.py); forward.py holds the same pass in PyTorch. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vector.h"

#define PANEL 16

typedef struct {
    const float *attention_norm, *down, *q_norm, *query, *latent_norm, *absorb_key, *absorb_value, *out;
    const float *mlp_norm, *gate_up, *mlp_down;              /* dense layer, or the shared expert */
    const float *router, *bias, *expert_gate_up, *expert_down; /* router is NULL in a dense layer */
    int64_t inner;                                           /* width of gate_up's half */
} Layer;

typedef struct {
    int64_t layers, dim, heads, nope, rope, value, rank, q_rank, vocab;
    int64_t experts, top_k, expert_inner, normalise, max_length, slots;
    float eps, scale, scaling;
    const float *embedding, *cosines, *sines, *norm, *head; /* cosines, sines: [max_length, rope / 2] */
    const Layer *layer;
} Model;

static inline int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* ------------------------------------------------------------------------------------------------- products */

/* y[r, 16 p .. 16 p + 15] = sum over i, in order, of x[r, i] * panel_p[i]; ROWS and PANELS are constants. */
#define KERNEL(ROWS, PANELS)                                                                                   \
    static void kernel_##ROWS##_##PANELS(int64_t in, const float *x, int64_t ldx, const float *w, float *y, int64_t ldy) \
    {                                                                                                          \
        v8 sum[ROWS][PANELS][2];                                                                               \
        for (int r = 0; r < ROWS; r++)                                                                         \
            for (int p = 0; p < PANELS; p++) sum[r][p][0] = sum[r][p][1] = splat(0.0f);                        \
        for (int64_t i = 0; i < in; i++)                                                                       \
            for (int p = 0; p < PANELS; p++) {                                                                 \
                const v8 a = *(const v8 *)(w + (p * in + i) * PANEL), b = *(const v8 *)(w + (p * in + i) * PANEL + 8); \
                for (int r = 0; r < ROWS; r++) {                                                               \
                    const v8 f = splat(x[r * ldx + i]);                                                        \
                    sum[r][p][0] += f * a;                                                                     \
                    sum[r][p][1] += f * b;                                                                     \
                }                                                                                              \
            }                                                                                                  \
        for (int r = 0; r < ROWS; r++)                                                                         \
            for (int p = 0; p < PANELS; p++) {                                                                 \
                *(v8 *)(y + r * ldy + p * PANEL) = sum[r][p][0];                                               \
                *(v8 *)(y + r * ldy + p * PANEL + 8) = sum[r][p][1];                                           \
            }                                                                                                  \
    }
KERNEL(1, 4) KERNEL(1, 1) KERNEL(2, 2) KERNEL(2, 1) KERNEL(3, 1) KERNEL(4, 1) KERNEL(5, 1) KERNEL(6, 1)

/* y [rows, padded(out)] = x [rows, in] w^T; y has room for whole panels in every row (ldy >= padded(out)). */
static void product(int64_t rows, int64_t in, int64_t out, const float *x, int64_t ldx, const float *w, float *y, int64_t ldy)
{
    const int64_t panels = padded(out) / PANEL;
    int64_t p = 0;
    if (rows == 1)
        for (; p + 4 <= panels; p += 4) kernel_1_4(in, x, ldx, w + p * in * PANEL, y + p * PANEL, ldy);
    if (rows == 2)
        for (; p + 2 <= panels; p += 2) kernel_2_2(in, x, ldx, w + p * in * PANEL, y + p * PANEL, ldy);
    for (; p < panels; p++) {
        const float *panel = w + p * in * PANEL;
        /* blocks of at most six rows, as even as can be: 8 is 4 + 4, not 6 + 2 */
        for (int64_t r = 0, blocks = (rows + 5) / 6; blocks > 0; blocks--) {
            const int64_t block = (rows - r + blocks - 1) / blocks;
            const float *from = x + r * ldx;
            float *to = y + r * ldy + p * PANEL;
            switch (block) {
            case 1: kernel_1_1(in, from, ldx, panel, to, ldy); break;
            case 2: kernel_2_1(in, from, ldx, panel, to, ldy); break;
            case 3: kernel_3_1(in, from, ldx, panel, to, ldy); break;
            case 4: kernel_4_1(in, from, ldx, panel, to, ldy); break;
            case 5: kernel_5_1(in, from, ldx, panel, to, ldy); break;
            case 6: kernel_6_1(in, from, ldx, panel, to, ldy); break;
            }
            r += block;
        }
    }
}

static float dot(int64_t n, const float *a, const float *b)
{
    v8 sum = splat(0.0f), more = splat(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        sum += *(const v8 *)(a + i) * *(const v8 *)(b + i);
        more += *(const v8 *)(a + i + 8) * *(const v8 *)(b + i + 8);
    }
    if (i + 8 <= n) {
        sum += *(const v8 *)(a + i) * *(const v8 *)(b + i);
        i += 8;
    }
    sum += more;
    float total = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* ------------------------------------------------------------------------------------------- pointwise parts */

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static void rms_norm(int64_t rows, int64_t dim, const float *x, int64_t ldx, const float *weight, float eps, float *y, int64_t ldy)
{
    for (int64_t r = 0; r < rows; r++, x += ldx, y += ldy) {
        const float factor = 1.0f / sqrtf(dot(dim, x, x) / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) y[i] = x[i] * factor * weight[i];
    }
}

/* hidden[r, i] = silu(gate) * up for both halves of a row of ``both`` [rows, 2 inner] (in place: the first half). */
static void swiglu(int64_t rows, int64_t inner, float *both, int64_t ld)
{
    for (int64_t r = 0; r < rows; r++) {
        float *gate = both + r * ld, *up = gate + inner;
        int64_t i = 0;
        for (; i + 8 <= inner; i += 8) {
            const v8 g = *(v8 *)(gate + i);
            *(v8 *)(gate + i) = g / (1.0f + exponential(-g)) * *(v8 *)(up + i);
        }
        for (; i < inner; i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}

static void rotate(int64_t half, float *x, const float *cosine, const float *sine)
{
    for (int64_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = a * sine[i] + b * cosine[i];
    }
}

/* ------------------------------------------------------------------------------------------------- attention */

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

/* Dot products of q with four rows, each summed in the same order whichever of the four it is. */
static inline __attribute__((always_inline)) v8 dot4(int64_t n, const float *q, const float *a, const float *b, const float *c, const float *d)
{
    v8 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const v8 part = *(const v8 *)(q + i);
        sum[0] += part * *(const v8 *)(a + i);
        sum[1] += part * *(const v8 *)(b + i);
        sum[2] += part * *(const v8 *)(c + i);
        sum[3] += part * *(const v8 *)(d + i);
    }
    /* neighbours, then pairs: lanes are the low halves of a, b, c, d and then their high halves */
    const v8 ab = SHUFFLE(sum[0], sum[1], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(sum[0], sum[1], 1, 9, 3, 11, 5, 13, 7, 15);
    const v8 cd = SHUFFLE(sum[2], sum[3], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(sum[2], sum[3], 1, 9, 3, 11, 5, 13, 7, 15);
    v8 total = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    for (; i < n; i++) total += (v8){q[i] * a[i], q[i] * b[i], q[i] * c[i], q[i] * d[i], 0, 0, 0, 0};
    return total;
}

#define BLOCK 64 /* cache rows that stay in the first-level cache while all heads read them */

/* scores[h, t] = q[h] . keys[t] * scale for t < length; room for a multiple of eight. */
static void score(int64_t heads, int64_t length, int64_t width, float scale, const float *q, int64_t q_ld, const float *keys, float *scores, int64_t ld)
{
    for (int64_t block = 0; block < length; block += BLOCK) {
        const int64_t end = block + BLOCK < length ? block + BLOCK : length;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = block; t < end; t += 8) {
                const float *row = keys + t * width, *last = keys + (length - 1) * width;
                v8 low, high;
                if (t + 8 <= length) {
                    low = dot4(width, q + h * q_ld, row, row + width, row + 2 * width, row + 3 * width);
                    row += 4 * width;
                    high = dot4(width, q + h * q_ld, row, row + width, row + 2 * width, row + 3 * width);
                } else { /* past the end the last row stands in; its scores are not used */
                    const float *rows[8];
                    for (int k = 0; k < 8; k++) rows[k] = t + k < length ? row + k * width : last;
                    low = dot4(width, q + h * q_ld, rows[0], rows[1], rows[2], rows[3]);
                    high = dot4(width, q + h * q_ld, rows[4], rows[5], rows[6], rows[7]);
                }
                const v8 total = SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
                *(v8 *)(scores + h * ld + t) = total * scale;
            }
    }
}

/* scores[t] = exp(scores[t] - max) for t < length; returns their sum. */
static float exponentials(int64_t length, float *scores)
{
    float most = -INFINITY;
    for (int64_t t = 0; t < length; t++) most = scores[t] > most ? scores[t] : most;
    v8 sum = splat(0.0f);
    for (int64_t t = 0; t < length; t += 8) {
        v8 e = exponential(*(v8 *)(scores + t) - most);
        for (int64_t k = length - t; k < 8; k++) e[k] = 0.0f;
        *(v8 *)(scores + t) = e;
        sum += e;
    }
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* out[i] = sum over t, in order, of weights[t] * rows[t][i], for COLUMNS * 8 columns; continues from what out holds. */
#define MIX(COLUMNS)                                                                                            \
    static void mix_##COLUMNS(int64_t count, const float *weights, const float *rows, int64_t width, float *out) \
    {                                                                                                           \
        v8 sum[COLUMNS];                                                                                        \
        for (int c = 0; c < COLUMNS; c++) sum[c] = *(v8 *)(out + 8 * c);                                        \
        for (int64_t t = 0; t < count; t++) {                                                                   \
            const v8 weight = splat(weights[t]);                                                                \
            for (int c = 0; c < COLUMNS; c++) sum[c] += weight * *(const v8 *)(rows + t * width + 8 * c);       \
        }                                                                                                       \
        for (int c = 0; c < COLUMNS; c++) *(v8 *)(out + 8 * c) = sum[c];                                        \
    }
MIX(8) MIX(1)

/* q[h] becomes softmax(q[h] K^T scale) V for all heads of one new position; V is the first ``rank`` columns of K. */
static void attend(int64_t heads, int64_t length, int64_t width, int64_t rank, float scale, float *q, int64_t q_ld, const float *keys, float *scores, int64_t ld)
{
    score(heads, length, width, scale, q, q_ld, keys, scores, ld);
    float totals[heads];
    for (int64_t h = 0; h < heads; h++) {
        totals[h] = exponentials(length, scores + h * ld);
        for (int64_t i = 0; i < rank; i++) q[h * q_ld + i] = 0.0f;
    }
    for (int64_t block = 0; block < length; block += BLOCK) {
        const int64_t count = block + BLOCK < length ? BLOCK : length - block;
        const float *rows = keys + block * width;
        for (int64_t h = 0; h < heads; h++) {
            const float *weights = scores + h * ld + block;
            float *out = q + h * q_ld;
            int64_t i = 0;
            for (; i + 64 <= rank; i += 64) mix_8(count, weights, rows + i, width, out + i);
            for (; i + 8 <= rank; i += 8) mix_1(count, weights, rows + i, width, out + i);
            for (; i < rank; i++)
                for (int64_t t = 0; t < count; t++) out[i] += weights[t] * rows[t * width + i];
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < rank; i++) q[h * q_ld + i] /= totals[h];
}

typedef struct {
    float *normed, *wide, *query, *latent_q, *mixed, *heads, *hidden, *gathered, *scores;
    int64_t wide_ld;
} Scratch;

static void attention(const Model *m, const Layer *l, int64_t n, const int64_t *slots, const int64_t *positions, float *x, float *keys, Scratch *s)
{
    const int64_t dim = m->dim, heads = m->heads, nope = m->nope, rope = m->rope, rank = m->rank, width = rank + rope;
    const int64_t query = heads * (nope + rope), first = m->q_rank ? m->q_rank : query;
    const int64_t ld = padded(first + width), query_ld = padded(query), latent_ld = padded(rank);
    rms_norm(n, dim, x, dim, l->attention_norm, m->eps, s->normed, dim);
    product(n, dim, first + width, s->normed, dim, l->down, s->wide, ld);
    float *q = s->wide;
    int64_t q_ld = ld;
    if (m->q_rank) {
        rms_norm(n, first, s->wide, ld, l->q_norm, m->eps, s->hidden, first);
        product(n, first, query, s->hidden, first, l->query, s->query, query_ld);
        q = s->query, q_ld = query_ld;
    }
    for (int64_t r = 0; r < n; r++) { /* store the new keys */
        float *row = keys + (slots[r] * m->max_length + positions[r]) * width, *made = s->wide + r * ld + first;
        const float *cosine = m->cosines + positions[r] * (rope / 2), *sine = m->sines + positions[r] * (rope / 2);
        rms_norm(1, rank, made + rope, rank, l->latent_norm, m->eps, row, rank);
        memcpy(row + rank, made, rope * sizeof(float));
        rotate(rope / 2, row + rank, cosine, sine);
        for (int64_t h = 0; h < heads; h++) rotate(rope / 2, q + r * q_ld + heads * nope + h * rope, cosine, sine);
    }
    for (int64_t h = 0; h < heads; h++) {
        product(n, nope, rank, q + h * nope, q_ld, l->absorb_key + h * nope * latent_ld, s->latent_q, latent_ld);
        for (int64_t r = 0; r < n; r++) {
            float *full = s->mixed + (r * heads + h) * (width + PANEL);
            memcpy(full, s->latent_q + r * latent_ld, rank * sizeof(float));
            memcpy(full + rank, q + r * q_ld + heads * nope + h * rope, rope * sizeof(float));
        }
    }
    for (int64_t r = 0; r < n; r++)
        attend(heads, positions[r] + 1, width, rank, m->scale, s->mixed + r * heads * (width + PANEL), width + PANEL,
               keys + slots[r] * m->max_length * width, s->scores, m->max_length + 8);
    const int64_t value_ld = padded(m->value), joined = heads * m->value;
    for (int64_t h = 0; h < heads; h++) {
        product(n, rank, m->value, s->mixed + h * (width + PANEL), heads * (width + PANEL), l->absorb_value + h * rank * value_ld, s->latent_q, value_ld);
        for (int64_t r = 0; r < n; r++) memcpy(s->heads + r * joined + h * m->value, s->latent_q + r * value_ld, m->value * sizeof(float));
    }
    const int64_t out_ld = padded(dim);
    product(n, joined, dim, s->heads, joined, l->out, s->hidden, out_ld);
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < dim; i++) x[r * dim + i] += s->hidden[r * out_ld + i];
}

/* ---------------------------------------------------------------------------------------------- feed-forward */

/* y [rows, padded(dim)] = down(silu(gate(x)) * up(x)) */
static void feed_forward(int64_t rows, int64_t dim, int64_t inner, const float *x, const float *gate_up, const float *down, float *y, Scratch *s)
{
    const int64_t ld = padded(2 * inner);
    product(rows, dim, 2 * inner, x, dim, gate_up, s->wide, ld);
    swiglu(rows, inner, s->wide, ld);
    product(rows, inner, dim, s->wide, ld, down, y, padded(dim));
}

/* The router's choice for n rows: experts in falling order of score + bias, weights from the score alone. */
static void route(const Model *m, const Layer *l, int64_t n, float *scores, int64_t ld, int16_t *chosen, int64_t chosen_ld, float *weights)
{
    for (int64_t r = 0; r < n; r++) {
        float *score = scores + r * ld, total = 0.0f;
        int16_t *mine = chosen + r * chosen_ld;
        for (int64_t e = 0; e < m->experts; e++) score[e] = sigmoid(score[e]);
        for (int64_t k = 0; k < m->top_k; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < m->experts; e++) {
                int taken = 0;
                for (int64_t j = 0; j < k; j++) taken |= mine[j] == e;
                if (!taken && (best < 0 || score[e] + l->bias[e] > score[best] + l->bias[best])) best = e;
            }
            mine[k] = (int16_t)best;
            weights[r * m->top_k + k] = score[best];
            total += score[best];
        }
        for (int64_t k = 0; k < m->top_k; k++) {
            if (m->normalise) weights[r * m->top_k + k] /= total + 1e-20f;
            weights[r * m->top_k + k] *= m->scaling;
        }
    }
}

static void mixture(const Model *m, const Layer *l, int64_t n, float *x, int16_t *chosen, int64_t chosen_ld, int64_t *rows, float *weights, float *made, Scratch *s)
{
    const int64_t dim = m->dim, out_ld = padded(dim), k = m->top_k, inner = m->expert_inner;
    product(n, dim, m->experts, s->normed, dim, l->router, s->hidden, padded(m->experts));
    route(m, l, n, s->hidden, padded(m->experts), chosen, chosen_ld, weights);
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t count = 0;
        for (int64_t r = 0; r < n; r++)
            for (int64_t j = 0; j < k; j++)
                if (chosen[r * chosen_ld + j] == e) {
                    memcpy(s->gathered + count * dim, s->normed + r * dim, dim * sizeof(float));
                    rows[count++] = r * k + j;
                }
        if (!count) continue;
        feed_forward(count, dim, inner, s->gathered, l->expert_gate_up + e * dim * padded(2 * inner), l->expert_down + e * inner * out_ld, s->hidden, s);
        for (int64_t c = 0; c < count; c++) memcpy(made + rows[c] * dim, s->hidden + c * out_ld, dim * sizeof(float));
    }
    feed_forward(n, dim, l->inner, s->normed, l->gate_up, l->mlp_down, s->hidden, s);
    for (int64_t r = 0; r < n; r++) {
        float *sum = s->normed + r * dim; /* not needed any more */
        for (int64_t i = 0; i < dim; i++) sum[i] = made[r * k * dim + i] * weights[r * k];
        for (int64_t j = 1; j < k; j++)
            for (int64_t i = 0; i < dim; i++) sum[i] += made[(r * k + j) * dim + i] * weights[r * k + j];
        for (int64_t i = 0; i < dim; i++) x[r * dim + i] += sum[i] + s->hidden[r * out_ld + i];
    }
}

/* --------------------------------------------------------------------------------------------------- the pass */

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Feed n tokens; x [n, dim] gets the hidden states before the final norm, experts [n, moe layers, k] the routing, keys
 * [layers, slots, max_length, rank + rope] the new keys. Returns 0, or 1 without memory. */
int etude_forward(const Model *m, int64_t n, const int64_t *tokens, const int64_t *slots, const int64_t *positions, float *x, int16_t *experts, int64_t moe_layers, float *keys)
{
    const int64_t dim = m->dim, width = m->rank + m->rope, query = m->heads * (m->nope + m->rope), k = m->top_k;
    int64_t widest = padded(most(query, m->q_rank) + width + PANEL);
    for (int64_t l = 0; l < m->layers; l++) widest = most(widest, padded(2 * m->layer[l].inner));
    widest = most(widest, padded(2 * m->expert_inner));
    const int64_t joined = most(m->heads * m->value, most(padded(m->rank), padded(m->value)));
    const int64_t hidden = most(padded(dim), most(padded(m->experts), m->q_rank));
    const int64_t per_row = dim * 2 + widest + padded(query) + joined * 2 + m->heads * (width + PANEL) + hidden + k * dim + k;
    float *block = aligned_alloc(64, ((n * per_row + m->heads * (m->max_length + 8)) * sizeof(float) + 63) / 64 * 64);
    int64_t *rows = malloc(n * k * sizeof(int64_t));
    if (!block || !rows) {
        free(block), free(rows);
        return 1;
    }
    float *at = block;
    Scratch s;
    s.wide = at, at += n * widest;
    s.normed = at, at += n * dim;
    s.gathered = at, at += n * dim;
    s.query = at, at += n * padded(query);
    s.latent_q = at, at += n * joined;
    s.heads = at, at += n * joined;
    s.mixed = at, at += n * m->heads * (width + PANEL);
    s.hidden = at, at += n * hidden;
    float *made = at;
    at += n * k * dim;
    float *weights = at;
    at += n * k;
    s.scores = at;
    for (int64_t r = 0; r < n; r++) memcpy(x + r * dim, m->embedding + tokens[r] * dim, dim * sizeof(float));
    int64_t moe = 0;
    for (int64_t i = 0; i < m->layers; i++) {
        const Layer *l = m->layer + i;
        attention(m, l, n, slots, positions, x, keys + i * m->slots * m->max_length * width, &s);
        rms_norm(n, dim, x, dim, l->mlp_norm, m->eps, s.normed, dim);
        if (l->router) {
            mixture(m, l, n, x, experts + moe++ * k, moe_layers * k, rows, weights, made, &s);
        } else {
            feed_forward(n, dim, l->inner, s.normed, l->gate_up, l->mlp_down, s.hidden, &s);
            for (int64_t r = 0; r < n; r++)
                for (int64_t j = 0; j < dim; j++) x[r * dim + j] += s.hidden[r * padded(dim) + j];
        }
    }
    free(block), free(rows);
    return 0;
}

/* logits [n, padded(vocab)] of rows of x [*, dim]. Returns 0, or 1 without memory. */
int etude_logits(const Model *m, int64_t n, const float *x, const int64_t *rows, float *logits)
{
    float *normed = malloc(n * m->dim * sizeof(float));
    if (!normed) return 1;
    for (int64_t r = 0; r < n; r++) rms_norm(1, m->dim, x + rows[r] * m->dim, m->dim, m->norm, m->eps, normed + r * m->dim, m->dim);
    product(n, m->dim, m->vocab, normed, m->dim, m->head, logits, padded(m->vocab));
    free(normed);
    return 0;
}

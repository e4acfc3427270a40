/* Causal attention in which key j is seen by the queries j .. reach[j] - 1 alone, forward and backward, in float32.
 *
 * That is what packed documents (reach: the end of the document) and trees of shared prefixes in depth-first order (reach: the
 * end of the subtree) need; blocks that see nothing of each other are never computed. The form of the mask is FlashMask's (Wang
 * et al., 2024). Every output is a sum in one fixed order, whatever the number of threads.
 *
 * Shapes, all contiguous: q [B, H, S, dk], k [B, G, S, dk], v [B, G, S, dv], reach [B, S]; query head h reads head h / (H / G).
 * A task is one (b, g). Queries go in blocks of ROWS, keys in panels of LANES; matrices that are read as panels are packed
 * [width / LANES][length][LANES], zeros where they are not full. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "vector.h"

#define LANES 16
#define ROWS 24
#define TILE (ROWS * LANES)
#define PADDING 48 /* of the length: whole blocks of queries and whole panels of keys */

typedef struct {
    int64_t batch, heads, groups, length, key_dim, value_dim;
    float scale;
    const float *q, *k, *v, *out, *lse, *d_out; /* the last three: backward only */
    const int32_t *reach;
    float *y, *y_lse, *dq, *dk, *dv;
    atomic_long next;
    atomic_int failed;
} Job;

/* What a thread works in; S, K, V: padded length, key and value widths. */
typedef struct {
    float *keys_t, *values, *values_t, *keys, *queries, *d_outs; /* panels */
    float *query, *d_out;                                        /* [ROWS][width] of one block, zeros past the end */
    float *p, *ds, *row;                                         /* tiles of one block; [ROWS][widest] of a result */
    float *dk, *dv;                                              /* [S][K], [S][V] */
    int32_t *low, *high, *seen;                                  /* of each panel: least and greatest reach; seen ones */
} Room;

static int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ------------------------------------------------------------------------------------------------- products */

/* y[r][0 .. 15] += sum over i < n of x[r * row + i * step] * w[i][0 .. 15] for NUMBER rows. */
#define PRODUCT(NUMBER)                                                                                                 \
    static inline void product_##NUMBER(int64_t n, const float *x, int64_t row, int64_t step, const float *w, float *y, \
                                        int64_t ldy)                                                                    \
    {                                                                                                                   \
        v8 a[NUMBER], b[NUMBER];                                                                                        \
        for (int r = 0; r < NUMBER; r++) a[r] = *(v8 *)(y + r * ldy), b[r] = *(v8 *)(y + r * ldy + 8);                  \
        for (int64_t i = 0; i < n; i++, w += LANES) {                                                                   \
            const v8 left = *(const v8 *)w, right = *(const v8 *)(w + 8);                                               \
            for (int r = 0; r < NUMBER; r++) {                                                                          \
                const v8 f = splat(x[r * row + i * step]);                                                              \
                a[r] += f * left, b[r] += f * right;                                                                    \
            }                                                                                                           \
        }                                                                                                               \
        for (int r = 0; r < NUMBER; r++) *(v8 *)(y + r * ldy) = a[r], *(v8 *)(y + r * ldy + 8) = b[r];                  \
    }
PRODUCT(6) PRODUCT(4)

/* tile [ROWS][LANES] = x [ROWS][n] times one panel */
static void score(int64_t n, const float *x, int64_t ldx, const float *panel, float *tile)
{
    memset(tile, 0, TILE * sizeof *tile);
    for (int r = 0; r < ROWS; r += 6) product_6(n, x + r * ldx, ldx, 1, panel, tile + r * LANES, LANES);
}

/* y [ROWS][width] += tile [ROWS][LANES] times rows first .. first + LANES - 1 of a matrix in panels */
static void spread(const float *tile, const float *panels, int64_t length, int64_t first, float *y, int64_t width)
{
    for (int64_t c = 0; c < width; c += LANES)
        for (int r = 0; r < ROWS; r += 6)
            product_6(LANES, tile + r * LANES, LANES, 1, panels + c * length + first * LANES, y + r * width + c, width);
}

/* y [LANES][width] += tile [ROWS][LANES] transposed times rows first .. first + ROWS - 1 of a matrix in panels */
static void gather(const float *tile, const float *panels, int64_t length, int64_t first, float *y, int64_t width)
{
    for (int64_t c = 0; c < width; c += LANES)
        for (int j = 0; j < LANES; j += 4)
            product_4(ROWS, tile + j, 1, LANES, panels + c * length + first * LANES, y + j * width + c, width);
}

/* ------------------------------------------------------------------------------------------------- packing */

/* x [length][dim] -> [width / LANES][padded][LANES] */
static void pack(const float *x, int64_t length, int64_t dim, int64_t padded, float *panels)
{
    memset(panels, 0, sizeof *panels * rounded(dim, LANES) * padded);
    for (int64_t i = 0; i < length; i++)
        for (int64_t d = 0; d < dim; d++) panels[d / LANES * LANES * padded + i * LANES + d % LANES] = x[i * dim + d];
}

/* x [length][dim] -> [padded / LANES][dim][LANES]: panels of its transpose */
static void pack_transposed(const float *x, int64_t length, int64_t dim, int64_t padded, float *panels)
{
    memset(panels, 0, sizeof *panels * dim * padded);
    for (int64_t i = 0; i < length; i++)
        for (int64_t d = 0; d < dim; d++) panels[i / LANES * LANES * dim + d * LANES + i % LANES] = x[i * dim + d];
}

/* Rows first .. first + ROWS - 1 of x, zeros past the end. */
static void take(const float *x, int64_t length, int64_t dim, int64_t first, float *block)
{
    const int64_t count = length - first < ROWS ? length - first : ROWS;
    memcpy(block, x + first * dim, sizeof *x * count * dim);
    memset(block + count * dim, 0, sizeof *x * (ROWS - count) * dim);
}

static void measure(const int32_t *reach, int64_t length, int64_t padded, Room *room)
{
    for (int64_t p = 0; p < padded / LANES; p++) {
        int32_t low = INT32_MAX, high = 0;
        for (int64_t j = p * LANES; j < (p + 1) * LANES; j++) {
            const int32_t end = j < length ? reach[j] : 0;
            low = end < low ? end : low, high = end > high ? end : high;
        }
        room->low[p] = low, room->high[p] = high;
    }
}

/* Panels of which the block of queries that starts at ``first`` sees something. */
static int64_t look(const Room *room, int64_t first, int64_t length)
{
    const int64_t end = first + ROWS < length ? first + ROWS : length;
    int64_t count = 0;
    for (int64_t p = 0; p * LANES < end; p++)
        if (room->high[p] > first) room->seen[count++] = (int32_t)p;
    return count;
}

/* ------------------------------------------------------------------------------------------------- scores */

static const float HIDDEN = -1e30f;

/* Scaled scores of a block against panel p; HIDDEN where the key is not seen. */
static void tile_scores(const Job *job, const Room *room, const int32_t *reach, int64_t first, int64_t p, float *tile)
{
    score(job->key_dim, room->query, job->key_dim, room->keys_t + p * LANES * job->key_dim, tile);
    for (int i = 0; i < TILE; i += 8) *(v8 *)(tile + i) *= job->scale;
    if ((p + 1) * LANES <= first + 1 && room->low[p] >= first + ROWS) return;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < LANES; c++) {
            const int64_t i = first + r, j = p * LANES + c;
            if (j > i || i >= job->length || i >= reach[j]) tile[r * LANES + c] = HIDDEN;
        }
}

/* exp(x - at), 0 where hidden */
static inline v8 weight(v8 x, float at)
{
    const v8 y = exponential(x - splat(at));
    return choose(x > splat(0.5f * HIDDEN), y, splat(0.0f));
}

static float largest(v8 x)
{
    float most = x[0];
    for (int i = 1; i < 8; i++) most = x[i] > most ? x[i] : most;
    return most;
}

static float total(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Softmax over the tiles of a block, unnormalised; sums and the log of the normaliser (``lse``) of each row. */
static void softmax(int64_t tiles, float *p, float *sums, float *lse)
{
    for (int r = 0; r < ROWS; r++) {
        v8 most = splat(HIDDEN), sum = splat(0.0f);
        for (int64_t t = 0; t < tiles; t++)
            for (int c = 0; c < LANES; c += 8) {
                const v8 x = *(v8 *)(p + t * TILE + r * LANES + c);
                most = choose(x > most, x, most);
            }
        const float top = largest(most);
        for (int64_t t = 0; t < tiles; t++)
            for (int c = 0; c < LANES; c += 8) {
                v8 *x = (v8 *)(p + t * TILE + r * LANES + c);
                *x = weight(*x, top);
                sum += *x;
            }
        sums[r] = total(sum);
        lse[r] = top + logf(sums[r]);
    }
}

/* ------------------------------------------------------------------------------------------------- the two passes */

static void forward(const Job *job, const Room *room, int64_t b, int64_t g)
{
    const int64_t length = job->length, dk = job->key_dim, dv = job->value_dim, ratio = job->heads / job->groups;
    const int64_t padded = rounded(length, PADDING), width = rounded(dv, LANES);
    const int32_t *reach = job->reach + b * length;
    pack_transposed(job->k + (b * job->groups + g) * length * dk, length, dk, padded, room->keys_t);
    pack(job->v + (b * job->groups + g) * length * dv, length, dv, padded, room->values);
    for (int64_t head = b * job->heads + g * ratio, last = head + ratio; head < last; head++)
        for (int64_t first = 0; first < length; first += ROWS) {
            float sums[ROWS], lse[ROWS];
            const int64_t tiles = look(room, first, length);
            take(job->q + head * length * dk, length, dk, first, room->query);
            for (int64_t t = 0; t < tiles; t++)
                tile_scores(job, room, reach, first, room->seen[t], room->p + t * TILE);
            softmax(tiles, room->p, sums, lse);
            memset(room->row, 0, sizeof(float) * ROWS * width);
            for (int64_t t = 0; t < tiles; t++)
                spread(room->p + t * TILE, room->values, padded, room->seen[t] * LANES, room->row, width);
            for (int64_t r = 0; r < ROWS && first + r < length; r++) {
                float *y = job->y + (head * length + first + r) * dv;
                for (int64_t d = 0; d < dv; d++) y[d] = room->row[r * width + d] / sums[r];
                job->y_lse[head * length + first + r] = lse[r];
            }
        }
}

/* dS = P * (dP - D) * scale of one tile, given dP in ``ds`` and, per row, the lse and D = sum of dO * O. */
static void tile_gradients(float scale, const float *lse, const float *delta, float *p, float *ds)
{
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < LANES; c += 8) {
            v8 *x = (v8 *)(p + r * LANES + c), *d = (v8 *)(ds + r * LANES + c);
            *x = weight(*x, lse[r]);
            *d = *x * (*d - splat(delta[r])) * scale;
        }
}

static void backward(const Job *job, const Room *room, int64_t b, int64_t g)
{
    const int64_t length = job->length, dk = job->key_dim, dv = job->value_dim, ratio = job->heads / job->groups;
    const int64_t padded = rounded(length, PADDING), kw = rounded(dk, LANES), vw = rounded(dv, LANES);
    const int32_t *reach = job->reach + b * length;
    const int64_t group = b * job->groups + g;
    pack_transposed(job->k + group * length * dk, length, dk, padded, room->keys_t);
    pack_transposed(job->v + group * length * dv, length, dv, padded, room->values_t);
    pack(job->k + group * length * dk, length, dk, padded, room->keys);
    memset(room->dk, 0, sizeof(float) * padded * kw);
    memset(room->dv, 0, sizeof(float) * padded * vw);
    for (int64_t head = b * job->heads + g * ratio, last = head + ratio; head < last; head++) {
        const float *q = job->q + head * length * dk, *d_out = job->d_out + head * length * dv;
        const float *out = job->out + head * length * dv;
        pack(q, length, dk, padded, room->queries);
        pack(d_out, length, dv, padded, room->d_outs);
        for (int64_t first = 0; first < length; first += ROWS) {
            float lse[ROWS] = {0}, delta[ROWS] = {0};
            const int64_t tiles = look(room, first, length);
            take(q, length, dk, first, room->query);
            take(d_out, length, dv, first, room->d_out);
            for (int64_t r = 0; r < ROWS && first + r < length; r++) {
                lse[r] = job->lse[head * length + first + r];
                for (int64_t d = 0; d < dv; d++) delta[r] += room->d_out[r * dv + d] * out[(first + r) * dv + d];
            }
            memset(room->row, 0, sizeof(float) * ROWS * kw);
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t panel = room->seen[t];
                tile_scores(job, room, reach, first, panel, room->p);
                score(dv, room->d_out, dv, room->values_t + panel * LANES * dv, room->ds);
                tile_gradients(job->scale, lse, delta, room->p, room->ds);
                spread(room->ds, room->keys, padded, panel * LANES, room->row, kw);
                gather(room->ds, room->queries, padded, first, room->dk + panel * LANES * kw, kw);
                gather(room->p, room->d_outs, padded, first, room->dv + panel * LANES * vw, vw);
            }
            for (int64_t r = 0; r < ROWS && first + r < length; r++)
                memcpy(job->dq + (head * length + first + r) * dk, room->row + r * kw, sizeof(float) * dk);
        }
    }
    for (int64_t j = 0; j < length; j++) {
        memcpy(job->dk + (group * length + j) * dk, room->dk + j * kw, sizeof(float) * dk);
        memcpy(job->dv + (group * length + j) * dv, room->dv + j * vw, sizeof(float) * dv);
    }
}

/* ------------------------------------------------------------------------------------------------- threads */

/* One allocation, cut up; NULL without memory. */
static float *furnish(const Job *job, Room *room)
{
    const int64_t padded = rounded(job->length, PADDING), panels = padded / LANES;
    const int64_t kw = rounded(job->key_dim, LANES), vw = rounded(job->value_dim, LANES), both = kw + vw;
    const int64_t sizes[] = {padded * kw, padded * vw, padded * vw, padded * kw, padded * kw, padded * vw,
                             ROWS * kw, ROWS * vw, panels * TILE, TILE, ROWS * both, padded * kw, padded * vw,
                             panels, panels, panels};
    float **places[] = {&room->keys_t, &room->values, &room->values_t, &room->keys, &room->queries, &room->d_outs,
                        &room->query, &room->d_out, &room->p, &room->ds, &room->row, &room->dk, &room->dv,
                        (float **)&room->low, (float **)&room->high, (float **)&room->seen};
    const int count = sizeof sizes / sizeof *sizes;
    int64_t size = 0;
    for (int i = 0; i < count; i++) size += rounded(sizes[i], LANES);
    float *all = malloc(sizeof *all * size), *at = all;
    for (int i = 0; all && i < count; at += rounded(sizes[i], LANES), i++) *places[i] = at;
    return all;
}

static void *work(void *given)
{
    Job *job = given;
    Room room;
    float *all = furnish(job, &room);
    if (!all) {
        atomic_store(&job->failed, 1);
        return NULL;
    }
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < job->batch * job->groups;) {
        const int64_t b = task / job->groups, g = task % job->groups;
        measure(job->reach + b * job->length, job->length, rounded(job->length, PADDING), &room);
        if (job->d_out) backward(job, &room, b, g);
        else forward(job, &room, b, g);
    }
    free(all);
    return NULL;
}

static int run(Job *job, int64_t threads)
{
    pthread_t helpers[64];
    int64_t started = 0;
    for (; started < threads - 1 && started < 64; started++)
        if (pthread_create(&helpers[started], NULL, work, job)) break; /* then there are fewer */
    work(job);
    for (int64_t i = 0; i < started; i++) pthread_join(helpers[i], NULL);
    return atomic_load(&job->failed) && atomic_load(&job->next) < job->batch * job->groups;
}

/* sizes: B, H, G, S, dk, dv, threads. Both return 1 when there is no memory. */
int etude_attention_forward(const int64_t *sizes, float scale, const float *q, const float *k, const float *v,
                            const int32_t *reach, float *out, float *lse)
{
    Job job = {.batch = sizes[0], .heads = sizes[1], .groups = sizes[2], .length = sizes[3], .key_dim = sizes[4],
               .value_dim = sizes[5], .scale = scale, .q = q, .k = k, .v = v, .reach = reach, .y = out, .y_lse = lse};
    return run(&job, sizes[6]);
}

int etude_attention_backward(const int64_t *sizes, float scale, const float *q, const float *k, const float *v,
                             const int32_t *reach, const float *out, const float *lse, const float *d_out, float *dq,
                             float *dk, float *dv)
{
    Job job = {.batch = sizes[0], .heads = sizes[1], .groups = sizes[2], .length = sizes[3], .key_dim = sizes[4],
               .value_dim = sizes[5], .scale = scale, .q = q, .k = k, .v = v, .out = out, .lse = lse, .d_out = d_out,
               .reach = reach, .dq = dq, .dk = dk, .dv = dv};
    return run(&job, sizes[6]);
}

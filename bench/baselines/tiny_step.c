// One training step of a small language model, by hand: the least that a step can cost on one core.
//
//     cc -O3 -march=native -DD=16 tiny_step.c -lm -o tiny_step && ./tiny_step 2000
//
// The model is the one of bench/tiny.py: learned positions, one pre-norm layer (RMS norm, 4 heads, biases, ReLU), an
// output matrix of its own, cross-entropy, clipping by the global norm, Adam. Prints microseconds per step and the loss.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef D
#define D 16
#endif
enum { BATCH = 16, LENGTH = 8, ROWS = BATCH * LENGTH, VOCABULARY = 27, HEADS = 4, HD = D / HEADS, F = 4 * D };

typedef struct {
    float token[VOCABULARY][D], position[LENGTH][D], norm1[D], norm2[D], norm3[D];
    float wq[D][D], wk[D][D], wv[D][D], wo[D][D], bq[D], bk[D], bv[D], bo[D];
    float w1[D][F], b1[F], w2[F][D], b2[D], output[D][VOCABULARY];
} Parameters;

static Parameters model, grads, mean, square;
static float x0[ROWS][D], n1[ROWS][D], q[ROWS][D], k[ROWS][D], v[ROWS][D], mixed[ROWS][D], x1[ROWS][D], n2[ROWS][D];
static float hidden[ROWS][F], x2[ROWS][D], n3[ROWS][D], logits[ROWS][VOCABULARY], weights[BATCH][HEADS][LENGTH][LENGTH];
static float scale1[ROWS], scale2[ROWS], scale3[ROWS];
static float dx[ROWS][D], dn[ROWS][D], dq[ROWS][D], dk[ROWS][D], dv[ROWS][D], dmixed[ROWS][D], dhidden[ROWS][F];

// out = x w + b
#define AFFINE(name, N, M)                                                                   \
    static void name(float (*restrict out)[M], float (*restrict x)[N], float (*restrict w)[M], const float* b) { \
        for (int r = 0; r < ROWS; r++) {                                                     \
            float row[M];                                                                    \
            for (int j = 0; j < M; j++) row[j] = b ? b[j] : 0.0f;                             \
            for (int i = 0; i < N; i++)                                                      \
                for (int j = 0; j < M; j++) row[j] += x[r][i] * w[i][j];                     \
            memcpy(out[r], row, sizeof row);                                                 \
        }                                                                                    \
    }                                                                                        \
    static void name##_vjp(float (*restrict dx)[N], float (*restrict dw)[M], float* db, float (*restrict g)[M],  \
                           float (*restrict x)[N], float (*restrict w)[M], int adds) {        \
        float transposed[M][N];                                                              \
        for (int i = 0; i < N; i++)                                                          \
            for (int j = 0; j < M; j++) transposed[j][i] = w[i][j];                          \
        for (int r = 0; r < ROWS; r++) {                                                     \
            float row[N];                                                                    \
            for (int i = 0; i < N; i++) row[i] = adds ? dx[r][i] : 0.0f;                      \
            for (int j = 0; j < M; j++)                                                      \
                for (int i = 0; i < N; i++) row[i] += g[r][j] * transposed[j][i];            \
            memcpy(dx[r], row, sizeof row);                                                  \
        }                                                                                    \
        for (int i = 0; i < N; i++) {                                                        \
            float row[M] = {0};                                                              \
            for (int r = 0; r < ROWS; r++)                                                   \
                for (int j = 0; j < M; j++) row[j] += x[r][i] * g[r][j];                     \
            memcpy(dw[i], row, sizeof row);                                                  \
        }                                                                                    \
        if (db)                                                                              \
            for (int j = 0; j < M; j++) db[j] = 0.0f;                                        \
        if (db)                                                                              \
            for (int r = 0; r < ROWS; r++)                                                   \
                for (int j = 0; j < M; j++) db[j] += g[r][j];                                \
    }
AFFINE(square_affine, D, D)
AFFINE(wide_affine, D, F)
AFFINE(narrow_affine, F, D)
AFFINE(output_affine, D, VOCABULARY)

static void rms(float out[ROWS][D], float x[ROWS][D], const float* w, float* scale) {
    for (int r = 0; r < ROWS; r++) {
        float sum = 0.0f;
        for (int j = 0; j < D; j++) sum += x[r][j] * x[r][j];
        scale[r] = 1.0f / sqrtf(sum / D + 1e-5f);
        for (int j = 0; j < D; j++) out[r][j] = x[r][j] * scale[r] * w[j];
    }
}

// dx += the cotangent of x
static void rms_vjp(float g[ROWS][D], float x[ROWS][D], const float* w, const float* scale, float* dw) {
    memset(dw, 0, D * sizeof *dw);
    for (int r = 0; r < ROWS; r++) {
        float dot = 0.0f;
        for (int j = 0; j < D; j++) {
            dw[j] += g[r][j] * x[r][j] * scale[r];
            dot += g[r][j] * w[j] * x[r][j];
        }
        const float common = dot * scale[r] * scale[r] * scale[r] / D;
        for (int j = 0; j < D; j++) dx[r][j] += g[r][j] * w[j] * scale[r] - x[r][j] * common;
    }
}

static float step(const int64_t (*ids)[LENGTH + 1], int number, float rate) {
    const float embedding_scale = sqrtf(D), score_scale = 1.0f / sqrtf(HD);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < D; j++)
            x0[r][j] = model.token[ids[r / LENGTH][r % LENGTH]][j] * embedding_scale + model.position[r % LENGTH][j];
    rms(n1, x0, model.norm1, scale1);
    square_affine(q, n1, model.wq, model.bq);
    square_affine(k, n1, model.wk, model.bk);
    square_affine(v, n1, model.wv, model.bv);
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < LENGTH; i++) {
                float *p = weights[b][h][i], highest = -INFINITY, sum = 0.0f;
                for (int j = 0; j <= i; j++) {
                    p[j] = 0.0f;
                    for (int c = 0; c < HD; c++) p[j] += q[b * LENGTH + i][h * HD + c] * k[b * LENGTH + j][h * HD + c];
                    p[j] *= score_scale;
                    highest = fmaxf(highest, p[j]);
                }
                for (int j = 0; j <= i; j++) sum += p[j] = expf(p[j] - highest);
                for (int j = 0; j <= i; j++) p[j] /= sum;
                for (int c = 0; c < HD; c++) {
                    float total = 0.0f;
                    for (int j = 0; j <= i; j++) total += p[j] * v[b * LENGTH + j][h * HD + c];
                    mixed[b * LENGTH + i][h * HD + c] = total;
                }
            }
    square_affine(x1, mixed, model.wo, model.bo);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < D; j++) x1[r][j] += x0[r][j];
    rms(n2, x1, model.norm2, scale2);
    wide_affine(hidden, n2, model.w1, model.b1);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < F; j++) hidden[r][j] = fmaxf(hidden[r][j], 0.0f);
    narrow_affine(x2, hidden, model.w2, model.b2);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < D; j++) x2[r][j] += x1[r][j];
    rms(n3, x2, model.norm3, scale3);
    output_affine(logits, n3, model.output, NULL);
    float loss = 0.0f;
    for (int r = 0; r < ROWS; r++) {  // logits become their cotangents
        const int64_t label = ids[r / LENGTH][r % LENGTH + 1];
        float highest = -INFINITY, sum = 0.0f;
        for (int j = 0; j < VOCABULARY; j++) highest = fmaxf(highest, logits[r][j]);
        loss += highest - logits[r][label];
        for (int j = 0; j < VOCABULARY; j++) sum += logits[r][j] = expf(logits[r][j] - highest);
        loss += logf(sum);
        for (int j = 0; j < VOCABULARY; j++) logits[r][j] /= sum * ROWS;
        logits[r][label] -= 1.0f / ROWS;
    }
    output_affine_vjp(dn, grads.output, NULL, logits, n3, model.output, 0);
    memset(dx, 0, sizeof dx);
    rms_vjp(dn, x2, model.norm3, scale3, grads.norm3);
    narrow_affine_vjp(dhidden, grads.w2, grads.b2, dx, hidden, model.w2, 0);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < F; j++) dhidden[r][j] = hidden[r][j] > 0.0f ? dhidden[r][j] : 0.0f;
    wide_affine_vjp(dn, grads.w1, grads.b1, dhidden, n2, model.w1, 0);
    rms_vjp(dn, x1, model.norm2, scale2, grads.norm2);
    square_affine_vjp(dmixed, grads.wo, grads.bo, dx, mixed, model.wo, 0);
    memset(dk, 0, sizeof dk);
    memset(dv, 0, sizeof dv);
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < LENGTH; i++) {
                const float *p = weights[b][h][i], *g = dmixed[b * LENGTH + i] + h * HD;
                float dp[LENGTH], total = 0.0f, row[HD] = {0};
                for (int j = 0; j <= i; j++) {
                    dp[j] = 0.0f;
                    for (int c = 0; c < HD; c++) {
                        dp[j] += g[c] * v[b * LENGTH + j][h * HD + c];
                        dv[b * LENGTH + j][h * HD + c] += p[j] * g[c];
                    }
                    total += p[j] * dp[j];
                }
                for (int j = 0; j <= i; j++) {
                    const float ds = p[j] * (dp[j] - total) * score_scale;
                    for (int c = 0; c < HD; c++) {
                        row[c] += ds * k[b * LENGTH + j][h * HD + c];
                        dk[b * LENGTH + j][h * HD + c] += ds * q[b * LENGTH + i][h * HD + c];
                    }
                }
                memcpy(dq[b * LENGTH + i] + h * HD, row, sizeof row);
            }
    square_affine_vjp(dn, grads.wq, grads.bq, dq, n1, model.wq, 0);
    square_affine_vjp(dn, grads.wk, grads.bk, dk, n1, model.wk, 1);
    square_affine_vjp(dn, grads.wv, grads.bv, dv, n1, model.wv, 1);
    rms_vjp(dn, x0, model.norm1, scale1, grads.norm1);
    memset(grads.token, 0, sizeof grads.token);
    memset(grads.position, 0, sizeof grads.position);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < D; j++) {
            grads.token[ids[r / LENGTH][r % LENGTH]][j] += embedding_scale * dx[r][j];
            grads.position[r % LENGTH][j] += dx[r][j];
        }
    float *p = (float*)&model, *g = (float*)&grads, *m = (float*)&mean, *s = (float*)&square, norm = 0.0f;
    const int count = sizeof model / sizeof(float);
    for (int i = 0; i < count; i++) norm += g[i] * g[i];
    const float clip = 1.0f / fmaxf(1.0f, sqrtf(norm)), beta1 = 0.9f, beta2 = 0.98f;
    const float rate1 = rate / (1.0f - powf(beta1, number)), correction = 1.0f / (1.0f - powf(beta2, number));
    for (int i = 0; i < count; i++) {
        const float gradient = clip * g[i];
        m[i] = beta1 * m[i] + (1.0f - beta1) * gradient;
        s[i] = beta2 * s[i] + (1.0f - beta2) * gradient * gradient;
        p[i] -= rate1 * m[i] / (sqrtf(s[i] * correction) + 1e-9f);
    }
    return loss / ROWS;
}

int main(int argc, char** argv) {
    const int steps = argc > 1 ? atoi(argv[1]) : 2000;
    float* p = (float*)&model;
    for (size_t i = 0; i < sizeof model / sizeof(float); i++) p[i] = (rand() / (float)RAND_MAX - 0.5f) / sqrtf(D);
    for (int j = 0; j < D; j++) model.norm1[j] = model.norm2[j] = model.norm3[j] = 1.0f;
    static int64_t ids[64][BATCH][LENGTH + 1];
    for (int i = 0; i < 64; i++)
        for (int b = 0; b < BATCH; b++)
            for (int t = 0; t <= LENGTH; t++) ids[i][b][t] = rand() % VOCABULARY;
    struct timespec begin, end;
    float loss = 0.0f;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    for (int i = 1; i <= steps; i++) loss = step(ids[i % 64], i, 1e-3f);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    printf("%.1f %.4f\n", ((end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) * 1e-3) / steps, loss);
    return 0;
}

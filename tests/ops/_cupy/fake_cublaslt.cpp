// cuBLASLt on the memory of the host: what it is told is checked as the library does, and computed in the plainest way.
#include "cuda_on_host.h"  // half precision

enum { SUCCESS = 0, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { FLOAT = 0, HALF = 2, BFLOAT16 = 14, COMPUTE_32F = 68, COMPUTE_TF32 = 77 };

struct Product { int compute, scalar, transposed[2] = {0, 0}; uint32_t epilogue = 1; uint64_t bias = 0; };
struct Layout { int type; uint64_t rows, columns; int64_t leading; };
struct Preference { uint64_t workspace = 0; uint32_t reduction = 7, aligned[4] = {256, 256, 256, 256}; };
struct Algorithm { uint64_t m, n, k, aligned[4], of_bias; };
struct Heuristic { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };
static_assert(sizeof(Algorithm) == 64 && sizeof(Heuristic) == 96, "as in cublasLt.h");

static const uint64_t REFUSED = 13, NO_MEMORY = 1013, FAILING = 1014;  // columns for which there is no algorithm, ...
static int alive = 0;

static uint64_t alignment(uint64_t address) { return address & -address; }

static float widen(int type, const void* memory, uint64_t place)
{
    if (type == FLOAT) return ((const float*)memory)[place];
    if (type == HALF) return half_to_float(((const uint16_t*)memory)[place]);
    uint32_t bits = (uint32_t)((const uint16_t*)memory)[place] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void narrow(int type, void* memory, uint64_t place, float value)
{
    if (type == FLOAT) { ((float*)memory)[place] = value; return; }
    if (type == HALF) { ((uint16_t*)memory)[place] = float_to_half(value); return; }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t*)memory)[place] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T> static int take(T* place, const void* value, size_t size)
{
    if (size != sizeof(T)) return INVALID_VALUE;
    memcpy(place, value, size);
    return SUCCESS;
}

// Whether sizes fit; m, n and k as cuBLAS names them.
static bool fits(const Product* p, const Layout* a, const Layout* b, const Layout* d, uint64_t* m, uint64_t* n, uint64_t* k)
{
    *m = p->transposed[0] ? a->columns : a->rows;
    *k = p->transposed[0] ? a->rows : a->columns;
    *n = p->transposed[1] ? b->rows : b->columns;
    uint64_t inner = p->transposed[1] ? b->columns : b->rows;
    bool led = a->leading >= (int64_t)a->rows && b->leading >= (int64_t)b->rows && d->leading >= (int64_t)d->rows;
    return led && inner == *k && d->rows == *m && d->columns == *n && a->type == b->type && b->type == d->type;
}

extern "C" {

size_t cublasLtGetVersion() { return 130000; }

int alive_descriptors() { return alive; }

int cublasLtMatmulDescCreate(Product** made, int compute, int scalar)
{
    if ((compute != COMPUTE_32F && compute != COMPUTE_TF32) || scalar != FLOAT) return INVALID_VALUE;
    *made = new Product{compute, scalar};
    ++alive;
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(Product* p, int attribute, const void* value, size_t size)
{
    switch (attribute) {
    case 3: return take(&p->transposed[0], value, size);
    case 4: return take(&p->transposed[1], value, size);
    case 7: return take(&p->epilogue, value, size);
    case 8: return take(&p->bias, value, size);
    }
    return INVALID_VALUE;
}

int cublasLtMatmulDescDestroy(Product* p) { delete p; --alive; return SUCCESS; }

int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t columns, int64_t leading)
{
    if (type != FLOAT && type != HALF && type != BFLOAT16) return INVALID_VALUE;
    *made = new Layout{type, rows, columns, leading};
    ++alive;
    return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(Layout* p) { delete p; --alive; return SUCCESS; }
int cublasLtMatmulPreferenceCreate(Preference** made) { *made = new Preference; ++alive; return SUCCESS; }

int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value, size_t size)
{
    switch (attribute) {
    case 1: return take(&p->workspace, value, size);
    case 3: return take(&p->reduction, value, size);
    case 5: case 6: case 7: case 8: return take(&p->aligned[attribute - 5], value, size);
    }
    return INVALID_VALUE;
}

int cublasLtMatmulPreferenceDestroy(Preference* p) { delete p; --alive; return SUCCESS; }

int cublasLtMatmulAlgoGetHeuristic(
    void* handle, Product* p, Layout* a, Layout* b, Layout* c, Layout* d, Preference* wanted, int most, Heuristic* best,
    int* count)
{
    uint64_t m, n, k;
    if (handle != (void*)12345 || most < 1 || c != d || !fits(p, a, b, d, &m, &n, &k)) return INVALID_VALUE;
    *count = 0;
    if (m == NO_MEMORY) return ALLOC_FAILED;
    if (m == REFUSED || (wanted->reduction & 5)) return NOT_SUPPORTED;
    const uint32_t* aligned = wanted->aligned;
    *best = {{m, n, k, {aligned[0], aligned[1], aligned[2], aligned[3]}, alignment(p->bias)}, 0, SUCCESS, 1.0f, {}};
    best->workspace = k > 32 ? wanted->workspace / 1024 : 0;
    for (*count = 1; *count < most && *count < 3; ++*count) {
        best[*count] = best[0];
        if (*count == 2) best[2].algorithm.m = 0;  // fails
    }
    return SUCCESS;
}

int cublasLtMatmul(
    void* handle, Product* p, const float* alpha, const void* A, Layout* a, const void* B, Layout* b, const float* beta,
    const void* C, Layout* c, void* D, Layout* d, const Algorithm* algorithm, void* workspace, size_t size, void* stream)
{
    uint64_t m, n, k;
    if (handle != (void*)12345 || stream != (void*)54321 || *alpha != 1.0f || *beta != 0.0f) return INVALID_VALUE;
    if (!fits(p, a, b, d, &m, &n, &k) || C != D || c != d) return INVALID_VALUE;
    if (algorithm->m != m || algorithm->n != n || algorithm->k != k) return INVALID_VALUE;
    const void* places[] = {A, B, C, D};
    for (int i = 0; i < 4; ++i)
        if ((uint64_t)places[i] % algorithm->aligned[i]) return INVALID_VALUE;
    const bool sums_first = p->epilogue == 256;
    if (p->bias % algorithm->of_bias || (sums_first ? p->transposed[0] : p->epilogue != 4 && p->epilogue != 6))
        return INVALID_VALUE;
    if (m == FAILING) return EXECUTION_FAILED;
    if (k > 32) memset(workspace, 0xff, size);
    for (uint64_t j = 0; j < n; ++j)
        for (uint64_t i = 0; i < m; ++i) {
            float sum = 0.0f;
            for (uint64_t l = 0; l < k; ++l)
                sum += widen(a->type, A, p->transposed[0] ? i * a->leading + l : l * a->leading + i)
                     * widen(b->type, B, p->transposed[1] ? l * b->leading + j : j * b->leading + l);
            if (!sums_first) sum += widen(d->type, (const void*)p->bias, i);
            if (p->epilogue == 6) sum = sum > 0.0f ? sum : 0.0f;  // NaN becomes 0
            narrow(d->type, D, j * d->leading + i, sum);
        }
    for (uint64_t i = 0; sums_first && i < m; ++i) {
        float sum = 0.0f;
        for (uint64_t l = 0; l < k; ++l) sum += widen(a->type, A, l * a->leading + i);
        narrow(d->type, (void*)p->bias, i, sum);
    }
    return SUCCESS;
}

}

// The functions of cuBLAS that a float32 product of two matrices calls, on the memory of the host.
extern "C" {

int cublasSetStream_v2(void* handle, void* stream) { return handle == (void*)12345 && stream == (void*)54321 ? 0 : 7; }
int cublasSetWorkspace_v2(void*, void*, unsigned long) { return 7; }
int cublasGemmStridedBatchedEx() { return 7; }
int cublasGemmBatchedEx() { return 7; }

int cublasGemmEx(
    void*, int transa, int transb, int m, int n, int k, const float*, const float* a, int, int lda, const float* b, int,
    int ldb, const float*, float* c, int, int ldc, int, int)
{
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < m; ++i) {
            c[j * ldc + i] = 0.0f;
            for (int l = 0; l < k; ++l)
                c[j * ldc + i] += a[transa ? i * lda + l : l * lda + i] * b[transb ? l * ldb + j : j * ldb + l];
        }
    return 0;
}

}

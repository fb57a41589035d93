// What the library executes: a record is one operation on arrays whose memory stays where it is.
//
// `check` of an operation runs once, when a record is made. It compares shapes, dtypes and strides, so that no kernel
// touches memory outside its arrays, and splits the work into parts. The number of parts depends on the sizes alone,
// never on the number of threads: results have the same bits for any number.
#pragma once
#include <cstdint>

constexpr int MAX_ARRAYS = 13, MAX_DIMS = 6;

enum Type : int32_t { OTHER, BOOL, INT8, UINT8, INT32, INT64, BFLOAT16, FLOAT32, FLOAT64 };

struct Array {
    char* data;  // null if the array is absent
    int32_t ndim, type;
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];  // strides in bytes

    explicit operator bool() const { return data != nullptr; }
    template <class T> T* as() const { return reinterpret_cast<T*>(data); }
    int64_t size() const {
        int64_t product = 1;
        for (int i = 0; i < ndim; i++) product *= shape[i];
        return product;
    }
    int64_t itemsize() const {
        return type == FLOAT64 || type == INT64 ? 8 : type == FLOAT32 || type == INT32 ? 4 : type == BFLOAT16 ? 2 : 1;
    }
    // Whether the last `axes` axes are contiguous in C order, as an array without elements is with any strides.
    bool is_contiguous(int axes = MAX_DIMS) const {
        if (size() == 0) return true;
        int64_t stride = itemsize();
        for (int i = ndim - 1; i >= 0 && i >= ndim - axes; i--) {
            if (shape[i] != 1 && strides[i] != stride) return false;
            stride *= shape[i];
        }
        return true;
    }
    bool has_shape(const Array& other) const {
        if (ndim != other.ndim) return false;
        for (int i = 0; i < ndim; i++) if (shape[i] != other.shape[i]) return false;
        return true;
    }
};

struct Record {
    int32_t operation, parts;
    mutable int32_t status;         // set by a kernel: 1 if an index is out of range
    bool uses_blas;                 // set by `check`; `run` takes part -1, which is the whole product, too
    Array arrays[MAX_ARRAYS];
    int64_t integers[4];
    double numbers[4];
    int64_t plan[8];                // set by `check` for `run`, such as the rows of a part
};

struct Operation {
    const char* name;
    uint32_t outputs;                    // bit i is set if array i is written
    const char* (*check)(Record&);       // returns an error message or null, and sets `parts` and `plan`
    void (*run)(const Record&, int part);
};

// A list of operations, defined by each file once for each instruction set.
struct Family { const Operation* operations; int count; };

// cblas_sgemm of NumPy's BLAS library, with 64-bit integers; null if it cannot be used.
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
extern Sgemm blas_sgemm;
extern bool is_reproducible;  // whether each sum has the same order for any number of rows

extern float halves[1 << 16];  // all numbers of float16 by their bits

#define REQUIRE(condition, message) do { if (!(condition)) return message; } while (0)

// Split `count` items into parts of `step` items, so that a part has at least `grain` units of work.
inline void split(Record& r, int64_t count, int64_t work_per_item, int64_t grain = 60000, int64_t most = 64) {
    int64_t step = work_per_item > 0 ? (grain + work_per_item - 1) / work_per_item : count;
    step = step < 1 ? 1 : step;
    if ((count + step - 1) / step > most) step = (count + most - 1) / most;
    r.parts = static_cast<int32_t>((count + step - 1) / step);
    r.plan[0] = step;
}

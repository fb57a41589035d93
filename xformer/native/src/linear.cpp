// Products of matrices: out = x w + bias, with w in float32, int8, bfloat16 or quantized blocks.
//
// Lanes are columns, and an element of a result is one chain of fused products in the order of the depth. So its bits
// depend neither on the number of rows nor on the block sizes, nor on the memory layout of w, nor on whether w was packed.
// Only the BLAS library sums in other orders, and blocks that many rows share in that of `dots`: `is_reproducible` decides.
#include <cstdlib>
#include "blocks.h"

namespace ISA {

// A tile of the result stays in registers: 8 x 48 elements in 24 of 32 registers, or 6 x 16 in 12 of 16.
#if defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 3;
constexpr int vectors_for(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 1;
constexpr int vectors_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int ROWS = 2, VECTORS = 1;
constexpr int vectors_for(int) { return 1; }
#endif
constexpr int PANEL = 48;                            // columns that are packed next to each other
constexpr int DEPTH = 512, STEP = DEPTH + LANES;     // rows of x a power of two apart would share cache lines; whole blocks
constexpr int PANEL_DEPTH = VECTORS * LANES < PANEL ? 64 : DEPTH;  // rows of a panel that stay in the L1 cache
constexpr int GROUP = 32;                            // rows of w that are read at a time if it is not packed
constexpr int MOST_ROWS = 384, MOST_COLUMNS = 576;   // of a part: each part packs its rows of x and its columns of w
constexpr int MAX_ROWS = 12;                         // up to which packing w would cost more than it saves

constexpr bool IS_BLAS_FASTER = VECTORS == 1;        // with many rows; not than tiles of 512 bits
constexpr int64_t MIN_BLAS = 1 << 26;                // multiplications from which the BLAS library is faster
constexpr int64_t MIN_BLAS_ROWS = 192;               // with fewer, it is not

enum Kind : int64_t { ROWS_OF_W, COLUMNS_OF_W, PANELS, BLAS };
enum Form { MATRIX, PACKED, BLOCKS };                // of w

// An element is a number, or a block of several numbers of a column.
template <class T, class = void> constexpr int VALUES = 1;
template <class T> constexpr int VALUES<T, std::enable_if_t<(T::VALUES > 1)>> = T::VALUES;

// Strides are in elements.
template <class T> struct Matrix {
    T* data;
    int64_t row, column;
    T* at(int64_t i, int64_t j) const { return data + i / VALUES<T> * row + j * column; }
};

template <class T> struct Product {
    Matrix<const float> x;
    Matrix<const T> w;
    Matrix<float> out;
    const float *bias, *scales;  // of the columns; null if absent
    int64_t rows, depth, columns;
    bool accumulate;

    Product columns_from(int64_t j, int64_t count) const {
        Product p = *this;
        p.w.data = w.at(0, j);
        p.out.data = out.at(0, j);
        p.bias = bias ? bias + j : nullptr;
        p.scales = scales ? scales + j : nullptr;
        p.columns = count;
        return p;
    }
    Product rows_from(int64_t i, int64_t most) const {
        Product p = *this;
        p.x.data = x.at(i, 0);
        p.out.data = out.at(i, 0);
        p.rows = std::min(most, rows - i);
        return p;
    }
};

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of a thread, aligned to a cache line. The next call invalidates it.
static float* scratch(int64_t count) {
    static thread_local struct Memory {
        float* data = nullptr;
        int64_t size = 0;
        ~Memory() { std::free(data); }
    } memory;
    if (count > memory.size) {
        std::free(memory.data);
        memory.size = round_up(count, LANES);
        memory.data = static_cast<float*>(std::aligned_alloc(64, memory.size * sizeof(float)));
        if (!memory.data) std::abort();
    }
    return memory.data;
}

template <class T> INLINE Vector widen(const T* x, int64_t count) {
    if (count >= LANES) return widen(x);
    T lanes[LANES] = {};
    if (count > 0) std::memcpy(lanes, x, count * sizeof(T));
    return widen(lanes);
}

// Read the first `count` of the 16 * AT_A_TIME rows from row k of a column on; a block has all of them.
template <class T> constexpr int AT_A_TIME = VALUES<T> == 1 ? 1 : 2;
template <class T> INLINE void read(const T* column, int64_t k, int64_t count, Vector* out) {
    if constexpr (VALUES<T> == 1) *out = widen(column + k, count);
    else column[k / VALUES<T>].read(k % VALUES<T> / 32, out);
}

// --- packing ----------------------------------------------------------------------------------------------------------

// Copy a matrix to rows that are `step` apart, and fill them with zeros up to whole vectors.
template <class T> static void pack(Matrix<const T> x, int64_t rows, int64_t columns, float* y, int64_t step) {
    constexpr int HEIGHT = AT_A_TIME<T> * LANES;
    const int64_t width = round_up(columns, LANES);
    if constexpr (VALUES<T> == 1)
        if (x.column == 1) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j += LANES) {
                    __builtin_prefetch(x.at(i + 8, j));
                    store(y + i * step + j, widen(x.at(i, j), columns - j));
                }
            return;
        }
    for (int64_t j = 0; j < width; j += LANES)
        for (int64_t i = 0; i < rows; i += HEIGHT) {
            Vector strips[AT_A_TIME<T>][LANES];  // transposed
            const int64_t height = std::min<int64_t>(HEIGHT, rows - i);
            UNROLLED (int n = 0; n < LANES; n++) {
                Vector values[AT_A_TIME<T>] = {};
                const T* from = x.at(0, j + n);
                if (j + n >= columns) {
                } else if (x.row == 1) {
                    __builtin_prefetch(from + (i + 4 * HEIGHT) / VALUES<T>);
                    read(from, i, height, values);
                } else if constexpr (VALUES<T> == 1) {
                    T lanes[LANES] = {};
                    for (int64_t m = 0; m < height; m++) lanes[m] = from[(i + m) * x.row];
                    *values = widen(lanes);
                }
                for (int v = 0; v < AT_A_TIME<T>; v++) strips[v][n] = values[v];
            }
            for (int v = 0; v < AT_A_TIME<T>; v++) {
                transpose(strips[v]);
                UNROLLED (int m = 0; m < LANES; m++)
                    if (v * LANES + m < height) store(y + (i + v * LANES + m) * step + j, strips[v][m]);
            }
        }
}

// --- lanes are columns ------------------------------------------------------------------------------------------------

// Vectors of w by the rows of a block of x. `scales` and `bias` are null before the last rows of w.
template <class T> struct Tiles {
    const float* x;
    const T* w;
    int64_t step_w;
    float* out;
    int64_t step_out, depth, columns;
    bool accumulate;
    const float *scales, *bias;
    int64_t ahead;           // distance of the elements of w to prefetch, or 0
    const char* next;        // bytes to prefetch instead, `pace` of them for each row of w
    int64_t pace;

    Tiles at(int64_t row, int64_t column) const {
        Tiles t = *this;
        t.x += row * STEP;
        t.w += column;
        t.out += row * step_out + column;
        t.columns -= column;
        t.scales = scales ? scales + column : nullptr;
        t.bias = bias ? bias + column : nullptr;
        return t;
    }
};

// Write sums for the columns from j on, times their scales and plus their bias, which may be null.
INLINE void store_sums(float* out, Vector total, const float* scales, const float* bias, int64_t j, int64_t count) {
    Vector y = bias ? load(bias + j, count) : Vector{};
    if (scales) fma(y, total, load(scales + j, count));
    else y += total;
    store(out, y, count);
}

template <int M, int C, class T> static void tile(const Tiles<T>& tiles) {
    const Tiles<T> t = tiles;  // in registers
    for (int m = 0; m < M; m++)  // the next rows
        for (int j = 0; j < C * LANES; j += 16) __builtin_prefetch(t.out + (m + M) * t.step_out + j, 1);
    Vector total[M][C];
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
            total[m][c] = t.accumulate ? load(t.out + m * t.step_out + c * LANES, t.columns - c * LANES) : Vector{};
    auto multiply = [&](auto prefetch) __attribute__((always_inline)) {
        const T* w = t.w;
        for (int64_t k = 0; k < t.depth; k++, w += t.step_w) {
            Vector row[C];
            for (int c = 0; c < C; c++) row[c] = widen(w + c * LANES);
            prefetch(w, k);
            for (int m = 0; m < M; m++)
                for (int c = 0; c < C; c++) fma(total[m][c], t.x[m * STEP + k], row[c]);
        }
    };
    if (t.pace) multiply([&](const T*, int64_t k) __attribute__((always_inline)) { __builtin_prefetch(t.next + k * t.pace); });
    else if (t.ahead == 0) multiply([](const T*, int64_t) {});
    else multiply([&](const T* w, int64_t) __attribute__((always_inline)) {
        for (int i = 0; i < (C * LANES < PANEL ? PANEL : C * LANES); i += 64 / sizeof(T)) __builtin_prefetch(w + t.ahead + i);
    });
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) {
            const int64_t j = c * LANES, count = t.columns - j;
            store_sums(t.out + m * t.step_out + j, total[m][c], t.scales, t.bias, j, count);
        }
}

// All columns, C vectors at a time as long as there are that many.
template <int M, int C, class T> static void row_of_tiles(const Tiles<T>& t, int64_t j = 0) {
    for (; t.columns - j > (C - 1) * LANES; j += C * LANES) tile<M, C>(t.at(0, j));
    if constexpr (C > 1) row_of_tiles<M, C == 6 ? 3 : C == 3 ? 2 : C / 2>(t, j);
}

// The function for m rows, of which each tile has at most `MOST` vectors.
template <int MOST, class T, int M = ROWS> static auto for_rows(int64_t m) -> void (*)(const Tiles<T>&) {
    if constexpr (M > 1) if (m < M) return for_rows<MOST, T, M - 1>(m);
    return [](const Tiles<T>& t) { row_of_tiles<M, std::min(MOST, vectors_for(M))>(t); };
}

// Multiply by a panel, and prefetch the rows of the `next` one: spread evenly over the tiles if they are next to each other,
// or, if they are `step_next` bytes apart, a line of each row in each of the first tiles.
template <class T> static void multiply_panel(const Tiles<T>& t, int64_t rows, const T* next, int64_t step_next = 0) {
    constexpr int WIDTH_OF_TILES = VECTORS * LANES;
    if (rows <= 2) return for_rows<PANEL / LANES, T>(rows)(t);
    const int64_t bytes = PANEL * sizeof(T), count = (rows + ROWS - 1) / ROWS * ((t.columns + WIDTH_OF_TILES - 1) / WIDTH_OF_TILES);
    const int64_t pace = step_next ? step_next : (bytes + count - 1) / count;
    Tiles<T> part = t;
    if (next && (step_next || pace <= 64)) part.next = reinterpret_cast<const char*>(next), part.pace = pace;
    const char* end = part.next + (step_next ? bytes : PANEL_DEPTH * bytes);
    for (int64_t j = 0; j < t.columns; j += WIDTH_OF_TILES)
        for (int64_t i = 0; i < rows; i += ROWS) {
            Tiles<T> tile = part.at(i, j);
            tile.columns = std::min<int64_t>(tile.columns, WIDTH_OF_TILES);
            for_rows<VECTORS, T>(rows - i)(tile);
            part.next += step_next ? 64 : part.pace * t.depth;
            if (part.next >= end) part.pace = 0;
            part.ahead = 0;
        }
}

// Call f(k, depth, tiles) for blocks of the depth, with x packed.
template <class T, class F> INLINE void each_block(const Product<T>& p, float* block, F f) {
    for (int64_t k = 0; k == 0 || k < p.depth; k += DEPTH) {
        const int64_t depth = std::min<int64_t>(DEPTH, p.depth - k);
        const bool is_last = k + depth == p.depth;
        pack<float>({p.x.at(0, k), p.x.row, p.x.column}, p.rows, depth, block, STEP);
        f(k, depth, Tiles<T>{block, nullptr, 0, p.out.data, p.out.row, depth, p.columns, p.accumulate || k > 0,
                             is_last ? p.scales : nullptr, is_last ? p.bias : nullptr, 0, nullptr, 0});
    }
}

template <class T> static void multiply_panels(const Product<T>& p, const T* panels) {
    float* block = scratch(p.rows * STEP + DEPTH * PANEL);
    float* panel = block + p.rows * STEP;
    each_block(p, block, [&](int64_t k, int64_t depth, const Tiles<T>& tiles) {
        for (int64_t j = 0; j < p.columns; j += PANEL) {
            const int64_t columns = std::min<int64_t>(PANEL, p.columns - j), width = round_up(columns, LANES);
            Tiles<T> t = tiles.at(0, j);
            t.columns = columns;
            t.step_w = width;
            if constexpr (VALUES<T> == 1)
                if (panels) {
                    t.step_w = PANEL;
                    for (int64_t first = 0; first == 0 || first < depth; first += PANEL_DEPTH) {
                        Tiles<T> part = t;
                        part.depth = std::min<int64_t>(PANEL_DEPTH, depth - first);
                        part.x += first;
                        part.w = panels + j * p.depth + (k + first) * PANEL;
                        part.accumulate = t.accumulate || first > 0;
                        part.ahead = (sizeof(T) == 4 ? 8192 : 2048) / sizeof(T);
                        if (first + part.depth < depth) part.scales = part.bias = nullptr;
                        const T* next = first + part.depth < depth ? part.w + part.depth * PANEL
                                        : j + PANEL < p.columns    ? panels + (j + PANEL) * p.depth + k * PANEL
                                        : k + depth < p.depth      ? panels + (k + depth) * PANEL
                                                                   : nullptr;
                        multiply_panel(part, p.rows, next);
                    }
                    continue;
                }
            pack<T>({p.w.at(k, j), p.w.row, p.w.column}, depth, columns, panel, width);
            const float* next = nullptr;
            if constexpr (sizeof(T) == 4)
                if (p.w.column == 1) next = j + PANEL < p.columns ? p.w.at(k, j + PANEL) : k + depth < p.depth ? p.w.at(k + depth, 0) : nullptr;
            multiply_panel(Tiles<float>{t.x, panel, width, t.out, t.step_out, depth, columns, t.accumulate, t.scales, t.bias,
                                        0, nullptr, 0}, p.rows, next, p.w.row * 4);
        }
    });
}

// w is read where it is, GROUP rows at a time; meanwhile the next ones are prefetched.
static void multiply_rows(const Product<float>& p) {
    const int64_t whole = p.columns / LANES * LANES;
    if (whole < p.columns) multiply_panels<float>(p.columns_from(whole, p.columns - whole), nullptr);
    each_block(p.columns_from(0, whole), scratch(p.rows * STEP), [&](int64_t k, int64_t depth, const Tiles<float>& tiles) {
        for (int64_t first = 0; first == 0 || first < depth; first += GROUP) {
            Tiles<float> t = tiles;
            t.depth = std::min<int64_t>(GROUP, depth - first);
            const bool is_last = first + t.depth == depth;
            t.x += first;
            t.w = p.w.at(k + first, 0);
            t.step_w = p.w.row;
            t.accumulate = tiles.accumulate || first > 0;
            if (!is_last) t.scales = t.bias = nullptr;
            for (int64_t i = 0; i < p.rows; i += ROWS) {
                t.ahead = i > 0 || k + first + t.depth == p.depth ? 0 : t.depth * t.step_w;
                for_rows<8, float>(p.rows - i)(t.at(i, 0));
            }
        }
    });
}

// --- columns of w are contiguous --------------------------------------------------------------------------------------

// Multiply M rows of x, which have zeros up to whole vectors, by 16 columns from j on, which are transposed in registers.
template <int M, class T> static void multiply_16_columns(const float* x, int64_t step_x, const Product<T>& p, int64_t j) {
    const T* columns[LANES];
    for (int n = 0; n < LANES; n++) columns[n] = p.w.at(0, std::min(j + n, p.columns - 1));
    const int64_t count = p.columns - j;
    Vector total[M];
    for (int m = 0; m < M; m++) total[m] = p.accumulate ? load(p.out.at(m, j), count) : Vector{};
    auto multiply = [&](int64_t k, auto read) __attribute__((always_inline)) {
        Vector block[LANES];
        UNROLLED (int n = 0; n < LANES; n++) block[n] = read(columns[n] + k);
        transpose(block);
        UNROLLED (int n = 0; n < LANES; n++)
            for (int m = 0; m < M; m++) fma(total[m], x[m * step_x + k + n], block[n]);
    };
    const int64_t whole = p.depth / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) multiply(k, [](const T* from) __attribute__((always_inline)) { return widen(from); });
    if (whole < p.depth)
        multiply(whole, [&](const T* from) __attribute__((always_inline)) { return widen(from, p.depth - whole); });
    for (int m = 0; m < M; m++) store_sums(p.out.at(m, j), total[m], p.scales, p.bias, j, count);
}
template <class T, int M = ROWS> static auto columns_for_rows(int64_t m) -> void (*)(const float*, int64_t, const Product<T>&, int64_t) {
    if constexpr (M > 1) if (m < M) return columns_for_rows<T, M - 1>(m);
    return multiply_16_columns<M, T>;
}
template <class T> static void multiply_columns(const Product<T>& p) {
    const int64_t step = round_up(p.depth, LANES) + LANES;
    float* x = scratch(p.rows * step);
    pack(p.x, p.rows, p.depth, x, step);
    for (int64_t j = 0; j < p.columns; j += LANES)
        for (int64_t i = 0; i < p.rows; i += ROWS) columns_for_rows<T>(p.rows - i)(x + i * step, step, p.rows_from(i, ROWS), j);
}

// --- quantized blocks: lanes are positions in a sum ---------------------------------------------------------------------

// As `sum` of 16 vectors, whose transpose is added in the same tree.
INLINE Vector sums(Vector (&v)[LANES]) {
    transpose(v);
    UNROLLED (int width = LANES / 2; width; width /= 2)
        UNROLLED (int n = 0; n < width; n++) v[n] += v[n + width];
    return v[0];
}

// M rows of x, which have zeros up to whole vectors, by C columns, which are blocks or their values, `step_w` apart.
template <int M, int C, class T, class W>
static void dots(const float* x, int64_t step_x, const W* w, int64_t step_w, const Product<T>& p, int64_t i, int64_t j) {
    constexpr int N = AT_A_TIME<W>;
    Vector total[LANES] = {};
    for (int64_t k = 0; k < p.depth; k += N * LANES) {
        Vector columns[C][N];
        for (int c = 0; c < C; c++) read(w + c * step_w, k, LANES, columns[c]);
        for (int n = 0; n < N; n++)
            for (int m = 0; m < M; m++) {
                const Vector left = load(x + m * step_x + k + n * LANES);
                for (int c = 0; c < C; c++) fma(total[m * C + c], left, columns[c][n]);
            }
    }
    float results[LANES];
    store(results, sums(total));
    for (int n = 0; n < M * C; n++) *p.out.at(i + n / C, j + n % C) = (p.bias ? p.bias[j + n % C] : 0.0f) + results[n];
}

template <int M, int C, class T> static void multiply_dots(const Product<T>& p, const float* x, int64_t step) {
    const int64_t size = p.depth / VALUES<T> * sizeof(T);  // bytes of a column
    auto multiply = [&](auto width, int64_t j) __attribute__((always_inline)) {
        constexpr int N = decltype(width)::value;
        for (; j + N <= p.columns; j += N) {
            if constexpr (M < 4) {
                for (int n = 0; n < N; n++)  // the columns after the next ones
                    for (int64_t k = 0; k < size; k += 64) __builtin_prefetch(reinterpret_cast<const char*>(p.w.at(0, j + n + 2 * N)) + k);
                dots<M, N>(x, step, p.w.at(0, j), p.w.column, p, 0, j);
            } else {  // values of blocks are computed once for all rows
                float* columns = const_cast<float*>(x) + p.rows * step;
                for (int n = 0; n < N; n++)
                    for (int64_t k = 0; k < p.depth; k += 2 * LANES) {
                        Vector values[2];
                        read(p.w.at(0, j + n), k, 2 * LANES, values);
                        for (int v = 0; v < 2; v++) store(columns + n * step + k + v * LANES, values[v]);
                    }
                int64_t i = 0;
                for (; i + M <= p.rows; i += M) dots<M, N>(x + i * step, step, columns, step, p, i, j);
                for (; i < p.rows; i++) dots<1, N>(x + i * step, step, columns, step, p, i, j);
            }
        }
        return j;
    };
    multiply(std::integral_constant<int, 1>(), multiply(std::integral_constant<int, C>(), 0));
}
template <class T> static void multiply_blocks(const Product<T>& p) {
    constexpr bool is_wide = REGISTERS == 1;
    const int64_t step = p.depth + LANES;
    float* x = scratch((p.rows + 4) * step);
    pack(p.x, p.rows, p.depth, x, step);
    if (p.rows == 1) multiply_dots<1, is_wide ? 8 : 4>(p, x, step);
    else if (p.rows == 2) multiply_dots<2, is_wide ? 8 : 2>(p, x, step);
    else multiply_dots<4, is_wide ? 4 : 2>(p, x, step);
}

// --- the BLAS library -------------------------------------------------------------------------------------------------

static bool fits_blas(const Matrix<const float>& a, int64_t rows, int64_t columns) {
    return (a.column == 1 && a.row >= columns) || (a.row == 1 && a.column >= rows);
}
template <class T> static bool fits_blas(const Matrix<const T>&, int64_t, int64_t) { return false; }

static void multiply_blas(const Product<float>& p) {
    constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;
    for (int64_t i = 0; p.bias && i < p.rows; i++)
        for (int64_t j = 0; j < p.columns; j++) *p.out.at(i, j) = p.accumulate ? *p.out.at(i, j) + p.bias[j] : p.bias[j];
    auto order = [](const Matrix<const float>& a) { return a.column == 1 ? AS_IT_IS : TRANSPOSED; };
    auto step = [](const Matrix<const float>& a) { return a.column == 1 ? a.row : a.column; };
    blas_sgemm(ROW_MAJOR, order(p.x), order(p.w), p.rows, p.columns, p.depth, 1.0f, p.x.data, step(p.x), p.w.data,
               step(p.w), p.accumulate || p.bias ? 1.0f : 0.0f, p.out.data, p.out.row);
}

// --- operations -------------------------------------------------------------------------------------------------------

// Arrays: x (..., rows, depth), w (..., depth, columns) or its panels, out (..., rows, columns), bias, scales (columns,)
// or absent. Integers: whether to add to out.
struct Plan { int64_t kind, batch, row_step, column_step, row_parts, column_parts; };
static_assert(sizeof(Plan) <= sizeof(Record::plan), "a plan has too many numbers");

static const char* check_common(const Record& r, Form form) {
    const Array &x = r.arrays[0], &w = r.arrays[1], &out = r.arrays[2];
    const int n = out.ndim;
    REQUIRE(x && w && out, "expected x, w and out");
    REQUIRE(x.type == FLOAT32 && out.type == FLOAT32, "expected float32");
    if (form == BLOCKS) REQUIRE(w.type == UINT8, "expected w of uint8");
    else if (form == PACKED) REQUIRE(w.type == FLOAT32 || w.type == BFLOAT16, "expected w of float32 or bfloat16");
    else REQUIRE(w.type == FLOAT32 || w.type == INT8 || w.type == BFLOAT16, "expected w of float32, int8 or bfloat16");
    REQUIRE(n >= 2 && x.ndim >= 2 && x.ndim <= n && (form == MATRIX ? w.ndim >= 2 && w.ndim <= n : w.ndim == 3),
            "expected matrices");
    REQUIRE(x.shape[x.ndim - 2] == out.shape[n - 2], "rows differ");
    REQUIRE(out.size() == 0 || out.shape[n - 1] <= 1 || out.strides[n - 1] == 4, "expected rows of out to be contiguous");
    for (int i = 3; i < 5; i++) {
        const Array& row = r.arrays[i];
        REQUIRE(!row || (row.type == FLOAT32 && row.ndim == 1 && row.shape[0] == out.shape[n - 1] && row.is_contiguous()),
                "expected a contiguous float32 row for the columns of out");
    }
    REQUIRE(!r.integers[0] || !r.arrays[4], "scaled products cannot be added");
    for (const Array* a : {&x, &w}) {
        if (a == &w && form != MATRIX) break;
        for (int i = 0; i < a->ndim - 2; i++) {
            const int64_t size = a->shape[i];
            REQUIRE(size == 1 || size == out.shape[n - a->ndim + i], "leading axes do not broadcast");
        }
    }
    return nullptr;
}

// A view of the matrix number `item` of the leading axes of `out`.
template <class T> static Matrix<T> matrix(const Array& a, const Array& out, int64_t item) {
    const int64_t size = a.itemsize();
    char* data = a.data;
    for (int i = out.ndim - 3; i >= 0; i--) {
        const int own = i - (out.ndim - a.ndim);
        if (own >= 0 && a.shape[own] > 1) data += item % out.shape[i] * a.strides[own];
        item /= out.shape[i];
    }
    int64_t rows = a.shape[a.ndim - 2], columns = a.shape[a.ndim - 1];
    int64_t row = a.strides[a.ndim - 2] / size, column = a.strides[a.ndim - 1] / size;
    // The stride of an axis with one element means nothing.
    if (columns == 1) column = row == 1 ? rows : 1;
    if (rows == 1) row = column == 1 ? columns : 1;
    return {reinterpret_cast<T*>(data), row, column};
}

template <class T> static Product<T> product(const Record& r, int64_t item, Form form) {
    const Array &x = r.arrays[0], &w = r.arrays[1], &out = r.arrays[2];
    Product<T> p{matrix<const float>(x, out, item), {}, matrix<float>(out, out, item), r.arrays[3].as<const float>(),
                 r.arrays[4].as<const float>(), out.shape[out.ndim - 2], x.shape[x.ndim - 1], out.shape[out.ndim - 1],
                 r.integers[0] != 0};
    p.out.column = 1;
    if (VALUES<T> > 1) p.w = {w.as<const T>(), 1, w.shape[1]};
    else if (form == MATRIX) p.w = matrix<const T>(w, out, item);
    return p;
}

static void set_plan(Record& r, const Plan& plan) {
    std::memcpy(r.plan, &plan, sizeof plan);
    r.parts = static_cast<int32_t>(plan.batch * plan.row_parts * plan.column_parts);
}
static int64_t parts_of(int64_t count, int64_t step) { return (count + step - 1) / step; }

// Columns of a part that reads about 64 K elements of w, in multiples of a panel. Each part packs x, which takes a tenth of
// the time for many rows and a single panel.
static int64_t columns_of_part(int64_t depth, int64_t rows = 1) {
    const int64_t least = rows > MAX_ROWS ? 4 * PANEL : PANEL;
    return round_up(std::max<int64_t>(least, 65536 / std::max<int64_t>(1, depth)), PANEL);
}

// Parts that pack rows of x and columns of w; an even number if there are few, as most machines have an even number of cores.
static Plan panels_plan(int64_t batch, int64_t rows, int64_t depth, int64_t columns) {
    int64_t n = parts_of(rows, MOST_ROWS), m = parts_of(columns, n > 1 ? MOST_COLUMNS : columns_of_part(depth, rows));
    if (batch * n * m < 16) n += n > 1 && n % 2, m += m > 1 && m % 2;
    n = round_up(parts_of(rows, n), ROWS), m = round_up(parts_of(columns, m), PANEL);
    return {PANELS, batch, n, m, parts_of(rows, n), parts_of(columns, m)};
}

// The threads of this library share a product more evenly than those of OpenBLAS do, in 2 to 16 parts. Multiples of 48
// rows have the bits of the whole product with all kernels of OpenBLAS for x86-64; parts of the columns do not.
static Plan blas_plan(int64_t rows, int64_t columns) {
    const int64_t step = round_up(parts_of(rows, std::clamp<int64_t>(rows / MIN_BLAS_ROWS, 2, 16)), 48);
    return {BLAS, 1, step, columns, parts_of(rows, step), 1};
}

// `Product` of the first matrices decides how all of them are computed.
template <class T> static Plan plan_of(const Record& r) {
    const Array& out = r.arrays[2];
    const Product<T> p = product<T>(r, 0, MATRIX);
    int64_t batch = 1;
    for (int i = 0; i < out.ndim - 2; i++) batch *= out.shape[i];
    const bool is_by_rows = sizeof(T) == 4 && p.w.column == 1;
    if (p.rows <= MAX_ROWS && (p.w.row == 1 || is_by_rows)) {
        const int64_t step = columns_of_part(p.depth);
        return {p.w.row == 1 ? COLUMNS_OF_W : ROWS_OF_W, batch, p.rows, step, 1, parts_of(p.columns, step)};
    }
    if (sizeof(T) == 4 && IS_BLAS_FASTER && blas_sgemm && !is_reproducible && !p.scales && batch == 1 && p.depth > 0 &&
             p.rows >= MIN_BLAS_ROWS && p.rows * p.depth * p.columns >= MIN_BLAS && fits_blas(p.x, p.rows, p.depth) &&
             fits_blas(p.w, p.depth, p.columns) && p.out.row >= p.columns)
        return blas_plan(p.rows, p.columns);
    return panels_plan(batch, p.rows, p.depth, p.columns);
}

static const char* check_matmul(Record& r) {
    if (const char* error = check_common(r, MATRIX)) return error;
    const Array &x = r.arrays[0], &w = r.arrays[1], &out = r.arrays[2];
    REQUIRE(x.shape[x.ndim - 1] == w.shape[w.ndim - 2], "depths differ");
    REQUIRE(w.shape[w.ndim - 1] == out.shape[out.ndim - 1], "columns differ");
    if (out.size() == 0) return r.parts = 0, nullptr;
    const Plan plan = w.type == FLOAT32 ? plan_of<float>(r) : w.type == INT8 ? plan_of<int8_t>(r) : plan_of<uint16_t>(r);
    set_plan(r, plan);
    r.uses_blas = plan.kind == BLAS;
    return nullptr;
}

template <class T> static void run_as(const Record& r, int part, Form form) {
    if constexpr (sizeof(T) == 4) if (part < 0) return multiply_blas(product<float>(r, 0, form));
    Plan plan;
    std::memcpy(&plan, r.plan, sizeof plan);
    const int64_t column_part = part % plan.column_parts, row_part = part / plan.column_parts % plan.row_parts;
    Product<T> p = product<T>(r, part / (plan.column_parts * plan.row_parts), form);
    const int64_t j = column_part * plan.column_step;
    p = p.columns_from(j, std::min(plan.column_step, p.columns - j)).rows_from(row_part * plan.row_step, plan.row_step);
    if (form == PACKED) return multiply_panels(p, r.arrays[1].as<const T>() + j * p.depth);
    if (plan.kind == PANELS) return multiply_panels<T>(p, nullptr);
    if constexpr (VALUES<T> > 1) return multiply_blocks(p);
    else if (plan.kind == COLUMNS_OF_W) return multiply_columns(p);
    if constexpr (sizeof(T) == 4) plan.kind == BLAS ? multiply_blas(p) : multiply_rows(p);
}
template <Form form> static void run_matmul(const Record& r, int part) {
    const int32_t type = r.arrays[1].type;
    if (type == FLOAT32) return run_as<float>(r, part, form);
    if constexpr (form == MATRIX) if (type == INT8) return run_as<int8_t>(r, part, form);
    run_as<uint16_t>(r, part, form);
}

// w in panels (panels, depth, 48), the last one filled with zeros. x and out are matrices.
static bool are_panels(const Array& a, int64_t depth, int64_t columns) {
    return a.ndim == 3 && a.is_contiguous() && a.shape[0] == parts_of(columns, PANEL) && a.shape[1] == depth &&
           a.shape[2] == PANEL;
}
static const char* check_matmul_packed(Record& r) {
    if (const char* error = check_common(r, PACKED)) return error;
    const Array &x = r.arrays[0], &panels = r.arrays[1], &out = r.arrays[2];
    REQUIRE(out.ndim == 2 && are_panels(panels, x.shape[1], out.shape[1]), "the panels are of another matrix");
    if (out.size() == 0) return r.parts = 0, nullptr;
    set_plan(r, panels_plan(1, x.shape[0], x.shape[1], out.shape[1]));
    return nullptr;
}

// w in blocks (columns, blocks of a column, bytes), whose size determines the format. x and out are matrices.
static const char* check_matmul_blocks(Record& r) {
    if (const char* error = check_common(r, BLOCKS)) return error;
    const Array &x = r.arrays[0], &blocks = r.arrays[1], &out = r.arrays[2];
    REQUIRE(out.ndim == 2 && blocks.is_contiguous() && blocks.shape[0] == out.shape[1], "the blocks are of another matrix");
    const int64_t values = with_format(blocks.shape[2], [](auto block) { return VALUES<decltype(block)>; });
    REQUIRE(values > 0, "no format has blocks of this size");
    REQUIRE(!r.integers[0] && !r.arrays[4], "products with blocks are neither added nor scaled");
    REQUIRE(x.shape[1] == blocks.shape[1] * values, "depths differ");
    if (out.size() == 0) return r.parts = 0, nullptr;
    const int64_t rows = out.shape[0], depth = x.shape[1], columns = out.shape[1];
    if (rows > MAX_ROWS && !is_reproducible) return set_plan(r, panels_plan(1, rows, depth, columns)), nullptr;
    const int64_t row_step = std::max<int64_t>(16, 131072 / std::max<int64_t>(1, depth) / 4 * 4), step = columns_of_part(depth);
    set_plan(r, {COLUMNS_OF_W, 1, row_step, step, parts_of(rows, row_step), parts_of(columns, step)});
    return nullptr;
}
static void run_matmul_blocks(const Record& r, int part) {
    with_format(r.arrays[1].shape[2], [&](auto block) { return run_as<decltype(block)>(r, part, MATRIX), 0; });
}

// --- int8 -------------------------------------------------------------------------------------------------------------
//
// x is rounded to int8, with a scale for 64 elements of a row. The sum of 64 products of such integers is exact, both in
// int32 and in float32, so all processors have the same bits; then the sums are scaled and added up in the order of the
// depth. Integers of x are stored as bytes plus 128, as the instructions for dot products expect them.

constexpr int ROUNDED = 64, FOUR = 4;  // a panel of int8 has four rows of a column side by side, and a multiple of four rows

// `Weights` are four rows of 16 columns. The first tile of a panel also computes the `Sum` that the others start from,
// which cancels the 128.
#if defined(__AVX512VNNI__)
constexpr int TALL = 8;  // rows of x in a tile
typedef uint8_t Factor;
struct Weights { __m512i bytes; };
struct Sum { __m512i lanes; };
INLINE Weights four_rows(const int8_t* w) { return {_mm512_loadu_si512(w)}; }
INLINE void add_dots(Sum& sum, __m512i x, Weights w) {  // GCC 12 copies two registers for each call of the intrinsic
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.lanes) : "v"(x), "v"(w.bytes));
}
INLINE void add(Sum& sum, const uint8_t* x, Weights w) {
    int32_t four;
    std::memcpy(&four, x, FOUR);
    add_dots(sum, _mm512_set1_epi32(four), w);
}
INLINE void add_start(Sum& sum, Weights w) { add_dots(sum, _mm512_set1_epi8(-128), w); }
INLINE Sum negative(Sum sum) { return {_mm512_sub_epi32(_mm512_setzero_si512(), sum.lanes)}; }
INLINE void add(Sum& sum, Sum other) { sum.lanes = _mm512_add_epi32(sum.lanes, other.lanes); }
INLINE Vector widen(Sum sum) { return {{(Register)_mm512_maskz_cvtepi32_ps(-1, sum.lanes)}}; }
#elif defined(__AVX2__)
constexpr int TALL = 2;
typedef uint8_t Factor;
struct Weights { __m256i bytes[2]; };
struct Sum { __m256i lanes[2]; };
INLINE Weights four_rows(const int8_t* w) {
    return {{_mm256_loadu_si256((const __m256i*)w), _mm256_loadu_si256((const __m256i*)(w + 32))}};
}
INLINE void add(Sum& sum, const uint8_t* x, Weights w) {
    uint32_t four;
    std::memcpy(&four, x, FOUR);
    const __m256i factors = _mm256_set1_epi32(four ^ 0x80808080u);
    for (int i = 0; i < 2; i++) {  // |w| times x with the sign of w: sums of two fit into int16
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.bytes[i]), _mm256_sign_epi8(factors, w.bytes[i]));
        sum.lanes[i] = _mm256_add_epi32(sum.lanes[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
}
INLINE void add_start(Sum&, Weights) {}
INLINE Sum negative(Sum sum) { return sum; }
INLINE void add(Sum&, Sum) {}
INLINE Vector widen(Sum sum) {
    return {{(Register)_mm256_cvtepi32_ps(sum.lanes[0]), (Register)_mm256_cvtepi32_ps(sum.lanes[1])}};
}
#else
constexpr int TALL = ROWS;
typedef float Factor;
struct Weights { Vector rows[FOUR]; };
typedef Vector Sum;
INLINE Weights four_rows(const int8_t* w) {
    IntRegister four[REGISTERS];
    std::memcpy(four, w, sizeof four);
    Weights weights;
    for (int n = 0; n < FOUR; n++)
        EACH_REGISTER weights.rows[n].r[i] = __builtin_convertvector(four[i] << (24 - 8 * n) >> 24, Register);
    return weights;
}
INLINE void add(Sum& sum, const float* x, const Weights& w) { for (int n = 0; n < FOUR; n++) fma(sum, x[n], w.rows[n]); }
INLINE void add_start(Sum&, const Weights&) {}
INLINE Sum negative(Sum sum) { return sum; }
INLINE void add(Sum&, Sum) {}
INLINE Vector widen(Sum sum) { return sum; }
#endif

struct Rounded {
    const Factor* x;
    const float* scales_of_x;
    const int8_t* w;
    Sum* starts;
    float* out;
    int64_t groups, depth, step_out, columns;
    const float *scales, *bias;
};

template <int M, bool IS_FIRST> static void rounded_tile(const Rounded& t) {
    constexpr bool is_wide = WIDTH >= 8;  // then there are registers for a whole panel
    constexpr int C = is_wide ? PANEL / LANES : 1;
    for (int64_t first = 0; first < t.columns; first += C * LANES) {
        Vector total[M][C] = {};
        for (int64_t group = 0; group < t.groups; group++) {
            const Factor* x = t.x + group * ROUNDED;
            const int8_t* w = t.w + group * ROUNDED * PANEL + first * FOUR;
            const int64_t count = std::min<int64_t>(ROUNDED, t.depth - group * ROUNDED);
            Sum start[C] = {}, *kept = t.starts + group * (PANEL / LANES) + first / LANES, sum[M][C];
            for (int m = 0; m < M; m++)
                for (int c = 0; c < C; c++) sum[m][c] = IS_FIRST ? Sum{} : kept[c];
            for (int64_t k = 0; k < count; k += FOUR, w += FOUR * PANEL) {
                Weights rows[C];
                for (int c = 0; c < C; c++) rows[c] = four_rows(w + c * LANES * FOUR);
                if constexpr (IS_FIRST) for (int c = 0; c < C; c++) add_start(start[c], rows[c]);
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < C; c++) add(sum[m][c], x + m * t.groups * ROUNDED + k, rows[c]);
            }
            if constexpr (IS_FIRST)
                for (int c = 0; c < C; c++) {
                    kept[c] = negative(start[c]);
                    for (int m = 0; m < M; m++) add(sum[m][c], kept[c]);
                }
            for (int m = 0; m < M; m++)
                for (int c = 0; c < C; c++) fma(total[m][c], t.scales_of_x[m * t.groups + group], widen(sum[m][c]));
        }
        for (int m = 0; m < M; m++)
            for (int c = 0; c < C; c++) {
                const int64_t j = first + c * LANES, count = t.columns - j;
                if (count > 0) store_sums(t.out + m * t.step_out + j, total[m][c], t.scales, t.bias, j, count);
            }
    }
}
template <bool IS_FIRST, int M = TALL> static auto rounded_tile_for(int64_t m) -> void (*)(const Rounded&) {
    if constexpr (M > 1) if (m < M) return rounded_tile_for<IS_FIRST, M - 1>(m);
    return rounded_tile<M, IS_FIRST>;
}

// Arrays: x (rows, depth), out (rows, depth rounded up to groups) uint8, scales (rows, groups).
static const char* check_round_rows(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1], &scales = r.arrays[2];
    REQUIRE(x && out && scales && x.type == FLOAT32 && out.type == UINT8 && scales.type == FLOAT32,
            "expected float32, uint8 and float32");
    REQUIRE(x.ndim == 2 && out.ndim == 2 && scales.ndim == 2, "expected matrices");
    REQUIRE(out.shape[0] == x.shape[0] && scales.shape[0] == x.shape[0], "rows differ");
    REQUIRE(scales.shape[1] == parts_of(x.shape[1], ROUNDED) && out.shape[1] == scales.shape[1] * ROUNDED, "groups differ");
    REQUIRE(x.is_contiguous(1) && out.is_contiguous() && scales.is_contiguous(), "expected contiguous rows");
    split(r, x.shape[0], x.shape[1]);
    return nullptr;
}
static void run_round_rows(const Record& r, int part) {
    const Array &x = r.arrays[0], &scales = r.arrays[2];
    const int64_t groups = scales.shape[1], depth = x.shape[1], first = part * r.plan[0];
    for (int64_t i = first; i < std::min(first + r.plan[0], x.shape[0]); i++) {
        const float* row = reinterpret_cast<const float*>(x.data + i * x.strides[0]);
        uint8_t* out = r.arrays[1].as<uint8_t>() + i * groups * ROUNDED;
        for (int64_t g = 0; g < groups; g++) {
            constexpr int N = ROUNDED / LANES;
            Vector v[N], size{}, invalid{};
            for (int n = 0; n < N; n++) {
                const int64_t k = g * ROUNDED + n * LANES;
                v[n] = k < depth ? load(row + k, depth - k) : Vector{};
                size = max(max(v[n], -v[n]), size);
                invalid += v[n] - v[n];  // NaN if an element is NaN or infinite
            }
            float scale = largest(size) / 127.0f;
            scale = scale > 0.0f ? scale : 1.0f;
            for (int n = 0; n < N; n++) {
                float lanes[LANES];
                store(lanes, v[n] / scale + 12582912.0f);  // the low bits are those of the nearest integer
                for (int e = 0; e < LANES; e++) {
                    uint32_t bits;
                    std::memcpy(&bits, lanes + e, sizeof bits);
                    out[g * ROUNDED + n * LANES + e] = static_cast<uint8_t>(bits + 128);
                }
            }
            scales.as<float>()[i * groups + g] = scale + sum(invalid);
        }
    }
}

// Arrays: x and its scales, as `round_rows` writes them, int8 panels of w, out, bias or absent, scales of the columns.
static const char* check_matmul_rounded(Record& r) {
    const Array &x = r.arrays[0], &x_scales = r.arrays[1], &panels = r.arrays[2], &out = r.arrays[3];
    REQUIRE(x && x_scales && panels && out && r.arrays[5], "expected x, w, out and the scales of both");
    REQUIRE(x.type == UINT8 && x_scales.type == FLOAT32 && panels.type == INT8 && out.type == FLOAT32,
            "expected uint8, float32, int8 and float32");
    REQUIRE(x.ndim == 2 && x_scales.ndim == 2 && out.ndim == 2, "expected matrices");
    REQUIRE(x.shape[0] == out.shape[0] && x_scales.shape[0] == out.shape[0], "rows differ");
    REQUIRE(panels.ndim == 3 && panels.shape[1] % FOUR == 0 && are_panels(panels, panels.shape[1], out.shape[1]),
            "the panels are of another matrix");
    REQUIRE(x_scales.shape[1] == parts_of(panels.shape[1], ROUNDED) && x.shape[1] == x_scales.shape[1] * ROUNDED, "groups differ");
    REQUIRE(x.is_contiguous() && x_scales.is_contiguous() && out.is_contiguous(1), "expected contiguous rows");
    for (int i = 4; i < 6; i++) {
        const Array& row = r.arrays[i];
        REQUIRE(!row || (row.type == FLOAT32 && row.ndim == 1 && row.shape[0] == out.shape[1] && row.is_contiguous()),
                "expected a contiguous float32 row for the columns of out");
    }
    if (out.size() == 0) return r.parts = 0, nullptr;
    const int64_t columns = out.shape[1], step = columns_of_part(panels.shape[1]);
    set_plan(r, {PANELS, 1, out.shape[0], step, 1, parts_of(columns, step)});
    return nullptr;
}
static void run_matmul_rounded(const Record& r, int part) {
    Plan plan;
    std::memcpy(&plan, r.plan, sizeof plan);
    const Array &x = r.arrays[0], &out = r.arrays[3], &bias = r.arrays[4];
    const int64_t depth = r.arrays[2].shape[1], groups = r.arrays[1].shape[1], rows = out.shape[0], columns = out.shape[1];
    constexpr bool is_copied = std::is_same_v<Factor, float>;
    float* memory = scratch(groups * PANEL + (is_copied ? x.size() : 0));
    Sum* starts = reinterpret_cast<Sum*>(memory);
    const void* factors = x.data;
    if (is_copied) {
        factors = memory += groups * PANEL;
        for (int64_t i = 0; i < x.size(); i++) memory[i] = static_cast<float>(x.as<const uint8_t>()[i]) - 128.0f;
    }
    for (int64_t j = part * plan.column_step; j < std::min(columns, (part + 1) * plan.column_step); j += PANEL)
        for (int64_t i = 0; i < rows; i += TALL)
            (i == 0 ? rounded_tile_for<true>(rows) : rounded_tile_for<false>(rows - i))({
                static_cast<const Factor*>(factors) + i * groups * ROUNDED, r.arrays[1].as<const float>() + i * groups,
                r.arrays[2].as<const int8_t>() + j * depth, starts, reinterpret_cast<float*>(out.data + i * out.strides[0]) + j,
                groups, depth, out.strides[0] / 4, std::min<int64_t>(PANEL, columns - j), r.arrays[5].as<const float>() + j,
                bias ? bias.as<const float>() + j : nullptr});
}

// Arrays: x (rows, columns), out (columns,). Sums of blocks of rows are added, as sums of many terms lose digits.
static const char* check_sum_rows(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out && x.type == FLOAT32 && out.type == FLOAT32, "expected float32");
    REQUIRE(x.ndim == 2 && out.ndim == 1 && x.shape[1] == out.shape[0], "expected a matrix and a row of its columns");
    REQUIRE(x.is_contiguous(1) && out.is_contiguous(), "expected contiguous rows");
    const int64_t step = round_up(std::max<int64_t>(1, 32768 / std::max<int64_t>(1, x.shape[0])), 4 * LANES);
    r.parts = static_cast<int32_t>(parts_of(x.shape[1], step));
    r.plan[0] = step;
    return nullptr;
}
static void run_sum_rows(const Record& r, int part) {
    const Array& x = r.arrays[0];
    const int64_t step = r.plan[0], first = part * step, end = std::min(first + step, x.shape[1]), rows = x.shape[0];
    constexpr int BLOCK = 128, C = 4;
    for (int64_t j = first; j < end; j += C * LANES) {
        Vector total[C] = {};
        for (int64_t i = 0; i < rows; i += BLOCK) {
            Vector block[C] = {};
            for (int64_t k = i; k < std::min(rows, i + BLOCK); k++) {
                const float* row = reinterpret_cast<const float*>(x.data + k * x.strides[0]) + j;
                for (int c = 0; c < C; c++) block[c] += widen(row + c * LANES, end - j - c * LANES);
            }
            for (int c = 0; c < C; c++) total[c] += block[c];
        }
        for (int c = 0; c < C && j + c * LANES < end; c++)
            store(r.arrays[1].as<float>() + j + c * LANES, total[c], end - j - c * LANES);
    }
}

static const Operation operations[] = {
    {"matmul", 1 << 2, check_matmul, run_matmul<MATRIX>},
    {"matmul_packed", 1 << 2, check_matmul_packed, run_matmul<PACKED>},
    {"matmul_blocks", 1 << 2, check_matmul_blocks, run_matmul_blocks},
    {"round_rows", 1 << 1 | 1 << 2, check_round_rows, run_round_rows},
    {"matmul_rounded", 1 << 3, check_matmul_rounded, run_matmul_rounded},
    {"sum_rows", 1 << 1, check_sum_rows, run_sum_rows},
};
extern const Family linear_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA

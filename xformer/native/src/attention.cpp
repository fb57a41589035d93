// Attention and its derivative: the scores of a block of queries never leave the cache (Dao et al., 2022).
//
// Scores are stored as (keys, queries), so a vector holds the scores of 16 queries for one key. The softmax then needs no
// sums across the lanes of a vector, and keys and values are read where they are: only blocks of queries are copied.
//
// Each score is one chain of fused products in the order of the features, and each sum over keys is one chain in the
// order of the keys, from the exponentials relative to the largest score of all. Hidden keys add exact zeros. So a
// result depends neither on padding nor on the number of queries, and decoding has the bits of a full pass.
#include <limits>
#include <vector>
#include "vector.h"

namespace ISA {

constexpr int64_t QUERIES = 64, KEYS = 64;  // of a tile, which fits in the first-level cache
constexpr int64_t FEW_QUERIES = 8;          // up to here, the lanes of a vector are keys instead of queries
constexpr int64_t SCORES = 1 << 17;         // of a block of queries, which fit in the second-level cache
constexpr float LOWEST = std::numeric_limits<float>::lowest();  // initial maximum; finite, as inf - inf is NaN
constexpr float MASKED = -INFINITY;

INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Memory of this thread, aligned to vectors, in pieces that are valid until the next Workspace is made.
class Workspace {
    float* next;

public:
    explicit Workspace(int64_t size) {
        thread_local std::vector<float> memory;
        if ((int64_t)memory.size() < size + LANES) memory.resize(size + LANES);
        next = memory.data() + LANES - reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % LANES;
    }
    float* take(int64_t rows, int64_t columns) {  // columns: a multiple of LANES
        float* piece = next;
        next += rows * columns;
        return piece;
    }
};

// --- transposition ----------------------------------------------------------------------------------------------------

// Write the transpose of x, whose rows are `stride` apart, times `scale` to y, in rows of `lanes` columns.
static void copy_transposed(const float* x, int64_t stride, int64_t rows, int64_t columns, float scale, float* y,
                            int64_t lanes) {
    for (int64_t i = 0; i < lanes; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            Vector block[LANES];
            for (int n = 0; n < LANES; n++)
                block[n] = i + n < rows ? load(x + (i + n) * stride + j, columns - j) * scale : Vector{};
            transpose(block);
            for (int n = 0; n < LANES && j + n < columns; n++) store(y + (j + n) * lanes + i, block[n]);
        }
}

// Write the transpose of x, (columns, lanes), to `rows` rows of y; row i is multiplied by factor[i].
static void write_transposed(const float* x, int64_t lanes, int64_t rows, int64_t columns, const float* factor,
                             float* y, int64_t stride) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            Vector block[LANES];
            for (int n = 0; n < LANES; n++)
                block[n] = j + n < columns ? load(x + (j + n) * lanes + i) * load(factor + i) : Vector{};
            transpose(block);
            for (int n = 0; n < LANES && i + n < rows; n++) store(y + (i + n) * stride + j, block[n], columns - j);
        }
}

// Copy rows times `scale`, padded with zeros to whole vectors.
static void copy_rows(const float* x, int64_t stride, int64_t rows, int64_t columns, float scale, float* y) {
    for (int64_t i = 0; i < rows; i++, x += stride, y += padded(columns))
        for (int64_t j = 0; j < columns; j += LANES) store(y + j, load(x + j, columns - j) * scale);
}

// --- products of small matrices ---------------------------------------------------------------------------------------

// A tile of the product, (ROWS, VECTORS), stays in registers while it is summed; a single row may be longer.
#if defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 2, VECTORS_OF_ONE_ROW = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 1, VECTORS_OF_ONE_ROW = 4;
#else
constexpr int ROWS = 2, VECTORS = 1, VECTORS_OF_ONE_ROW = 2;
#endif

INLINE Register load_register(const float* x) { return *(const UnalignedRegister*)x; }

enum Initial { ZERO, SUMS };  // what the product is added to

struct Product {  // y = a b + initial sums
    const float* a;
    int64_t a_row, a_column;  // strides
    const float* b;
    int64_t b_row;
    float* y;
    int64_t y_row;
};

#define EACH_ROW UNROLLED (int i = 0; i < R; i++)
#define EACH_COLUMN UNROLLED (int j = 0; j < C * REGISTERS; j++)

template <int R, int C, Initial INITIAL> static inline void multiply_tile(const Product& p, int64_t depth) {
    Register sums[R][C * REGISTERS];
    EACH_ROW EACH_COLUMN sums[i][j] = INITIAL == ZERO ? Register{} : load_register(p.y + i * p.y_row + j * WIDTH);
    const float *a = p.a, *b = p.b;
    for (int64_t k = 0; k < depth; k++, a += p.a_column, b += p.b_row) {
        Register row[C * REGISTERS];
        EACH_COLUMN row[j] = load_register(b + j * WIDTH);
        EACH_ROW EACH_COLUMN sums[i][j] += a[i * p.a_row] * row[j];
    }
    EACH_ROW EACH_COLUMN *(UnalignedRegister*)(p.y + i * p.y_row + j * WIDTH) = sums[i][j];
}

template <int R, int C, Initial INITIAL> static void multiply_rows(Product p, int64_t rows, int64_t depth) {
    for (; rows >= R; rows -= R, p.a += R * p.a_row, p.y += R * p.y_row) multiply_tile<R, C, INITIAL>(p, depth);
    if constexpr (R > 1) if (rows) multiply_rows<R - 1, C, INITIAL>(p, rows, depth);
}

template <Initial INITIAL, int R = ROWS, int C = VECTORS>
static void multiply(Product p, int64_t rows, int64_t depth, int64_t columns) {
    for (; columns >= C * LANES; columns -= C * LANES, p.b += C * LANES, p.y += C * LANES)
        multiply_rows<R, C, INITIAL>(p, rows, depth);
    if constexpr (C > 1) if (columns) multiply<INITIAL, R, C - 1>(p, rows, depth, columns);
}

// --- what both directions share ---------------------------------------------------------------------------------------

template <class T = float> INLINE T* at(const Array& x, int64_t i, int64_t j, int64_t k = 0, int64_t l = 0) {
    return reinterpret_cast<T*>(x.data + i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3]);
}
INLINE int64_t row_stride(const Array& x) { return x.strides[2] / (int64_t)sizeof(float); }

// exp(x) for x <= 0 or NaN, with a relative error of 2e-7; zero below -87.3.
INLINE Vector exp_of_nonpositive(Vector x) {
    Vector clipped = max(splat(-87.3f), x);  // keeps NaN
    Vector n = clipped * 1.44269504f + (12582912.0f + 127.0f), power;
    EACH_REGISTER power.r[i] = (Register)((IntRegister)n.r[i] << 23);
    n = n - (12582912.0f + 127.0f);
    Vector r = clipped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vector p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return select(x < splat(-87.3f), Vector{}, p * power);
}

// The next 16 elements; their stride is 0 or 1 element. Lanes beyond `count` are zero or repeat the element.
INLINE Vector elements(const float* x, int64_t stride, int64_t count) { return stride ? load(x, count) : splat(*x); }
INLINE Vector elements(const int8_t* x, int64_t stride, int64_t count) {
    if (!stride) return splat(*x);
    if (count >= LANES) return widen(x);
    int8_t lanes[LANES] = {};
    std::memcpy(lanes, x, count);
    return widen(lanes);
}

INLINE Vector lane_numbers() {
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return load(numbers);
}

struct Tile {  // keys k, ..., k + m - 1 and queries q, ..., q + n - 1 of head h of sentence b
    int64_t b, h, q, n, k, m, lanes;
    float* scores;  // (m, lanes)
};

// Replace each score by f(score, element of x); x broadcasts to (batch, heads, queries, keys).
template <class T, class F> static void combine(const Tile& tile, const Array& x, F f) {
    const T* first = at<T>(x, tile.b, tile.h, tile.q, tile.k);
    const int64_t row = x.strides[2] / (int64_t)sizeof(T), column = x.strides[3];
    auto update = [&](float* scores, Vector v) { store(scores, f(load(scores), v)); };
    if (!row) {
        for (int64_t j = 0; j < tile.m; j++)
            for (int64_t i = 0; i < tile.lanes; i += LANES)
                update(tile.scores + j * tile.lanes + i, splat(first[column ? j : 0]));
        return;
    }
    for (int64_t i = 0; i < tile.lanes; i += LANES)
        for (int64_t j = 0; j < tile.m; j += LANES) {
            Vector block[LANES];
            for (int n = 0; n < LANES; n++)
                block[n] = i + n < tile.n ? elements(first + (i + n) * row + (column ? j : 0), column, tile.m - j)
                                          : Vector{};
            transpose(block);
            for (int n = 0; n < LANES && j + n < tile.m; n++) update(tile.scores + (j + n) * tile.lanes + i, block[n]);
        }
}

struct Problem {
    const Array &query, &key, &value, &mask, &bias, &dropout_mask;
    const int64_t heads, queries, keys, features, values;
    const int64_t offset;  // with a causal mask, the last key that the first query sees
    const bool is_causal;
    const float scale, dropout_scale;

    explicit Problem(const Record& r)
        : query(r.arrays[0]), key(r.arrays[1]), value(r.arrays[2]), mask(r.arrays[3]), bias(r.arrays[4]),
          dropout_mask(r.arrays[5]), heads(query.shape[1]), queries(query.shape[2]), keys(key.shape[2]),
          features(query.shape[3]), values(value.shape[3]), offset(keys - queries), is_causal(r.integers[0]),
          scale(r.numbers[0]), dropout_scale(r.numbers[1]) {}

    int64_t key_head(int64_t h) const { return h / (heads / key.shape[1]); }

    // Leave out keys at both ends that no query may attend to: padding.
    void trim(int64_t b, int64_t h, int64_t& first, int64_t& end) const {
        if (!mask || mask.strides[2] != 0) return;
        const int8_t* row = at<int8_t>(mask, b, h);
        while (first < end && !row[(end - 1) * mask.strides[3]]) end--;
        while (first < end && !row[first * mask.strides[3]]) first++;
    }

    // Call f(first key, number of keys) for the tiles of keys that queries q, ..., q + n - 1 see.
    template <class F> void each_tile(int64_t b, int64_t h, int64_t q, int64_t n, F f) const {
        int64_t first = 0, end = is_causal ? std::min(keys, q + n + offset) : keys;
        trim(b, h, first, end);
        for (; first < end; first += KEYS) f(first, std::min(KEYS, end - first));
    }

    // Compute the scores of a tile; queries: (features, lanes), scaled.
    void scores(const Tile& tile, const float* queries) const {
        const float* keys = at(key, tile.b, key_head(tile.h), tile.k);
        multiply<ZERO>({keys, row_stride(key), 1, queries, tile.lanes, tile.scores, tile.lanes}, tile.m, 
                       features, tile.lanes);
        if (bias) combine<float>(tile, bias, [](Vector s, Vector x) { return s + x; });
        if (mask) combine<int8_t>(tile, mask, [](Vector s, Vector x) { return select(x == Vector{}, splat(MASKED), s); });
        if (!is_causal) return;
        const Vector lanes = lane_numbers();
        const int64_t lead = tile.k - tile.q - offset;  // key j of the tile is seen from query j + lead on
        for (int64_t j = std::max<int64_t>(0, 1 - lead); j < tile.m; j++)
            for (int64_t i = 0; i < tile.lanes && i < j + lead; i += LANES) {
                float* s = tile.scores + j * tile.lanes + i;
                store(s, select(lanes < splat(j + lead - i), splat(MASKED), load(s)));
            }
    }

    void drop(const Tile& tile, float* x) const {
        if (!dropout_mask) return;
        Tile other = tile;
        other.scores = x;
        combine<int8_t>(other, dropout_mask, [scale = dropout_scale](Vector x, Vector keep) {
            return select(keep == Vector{}, Vector{}, x * scale);
        });
    }
};

// --- forward ----------------------------------------------------------------------------------------------------------

// Raise the largest scores so far.
static void raise(const Tile& tile, float* top) {
    for (int64_t i = 0; i < tile.lanes; i += LANES) {
        Vector largest = load(top + i);
        for (int64_t j = 0; j < tile.m; j++) largest = max(load(tile.scores + j * tile.lanes + i), largest);
        store(top + i, largest);
    }
}

// Replace scores by exponentials relative to the largest score, and add these to the totals.
static void exponentials(const Tile& tile, const float* top, float* total) {
    for (int64_t i = 0; i < tile.lanes; i += LANES) {
        const Vector largest = load(top + i);
        Vector all = load(total + i);
        for (int64_t j = 0; j < tile.m; j++) {
            float* s = tile.scores + j * tile.lanes + i;
            const Vector power = exp_of_nonpositive(load(s) - largest);
            all += power;
            store(s, power);
        }
        store(total + i, all);
    }
}

INLINE Vector inverse_or_zero(Vector x) { return select(x == Vector{}, Vector{}, 1.0f / x); }  // zero: fully masked

// Queries of a block: as many as have space for their scores, but whole vectors.
static int64_t queries_of_block(int64_t keys) {
    int64_t count = QUERIES;
    while (count > LANES && count * keys > SCORES) count /= 2;
    return count;
}

// A part is some blocks of queries of one head after the other.
static void run_many_queries(const Record& r, int64_t block) {
    const Problem p(r);
    const Array &out = r.arrays[6], &statistics = r.arrays[7];
    const int64_t most = queries_of_block(p.keys), blocks = (p.queries + most - 1) / most, head = block / blocks;
    const int64_t b = head / p.heads, h = head % p.heads;
    const int64_t q = block % blocks * most, n = std::min(most, p.queries - q), lanes = padded(n);
    Workspace workspace((p.features + p.values + p.keys + 2) * lanes);
    float *queries = workspace.take(p.features, lanes), *sums = workspace.take(p.values, lanes);
    float *scores = workspace.take(p.keys, lanes), *top = workspace.take(1, lanes), *total = workspace.take(1, lanes);
    copy_transposed(at(p.query, b, h, q), row_stride(p.query), n, p.features, p.scale, queries, lanes);
    std::fill_n(top, lanes, LOWEST);
    std::fill_n(total, lanes, 0.0f);
    std::fill_n(sums, p.values * lanes, 0.0f);
    auto each_tile = [&](auto f) {
        p.each_tile(b, h, q, n, [&](int64_t k, int64_t m) { f(Tile{b, h, q, n, k, m, lanes, scores + k * lanes}); });
    };
    each_tile([&](const Tile& tile) {
        p.scores(tile, queries);
        raise(tile, top);
    });
    each_tile([&](const Tile& tile) {
        exponentials(tile, top, total);
        p.drop(tile, tile.scores);
        const float* values = at(p.value, b, p.key_head(h), tile.k);
        multiply<SUMS>({values, 1, row_stride(p.value), tile.scores, lanes, sums, lanes}, p.values, tile.m, lanes);
    });
    for (int64_t i = 0; i < lanes; i += LANES) store(total + i, inverse_or_zero(load(total + i)));
    write_transposed(sums, lanes, n, p.values, total, at(out, b, h, q), row_stride(out));
    if (statistics) {
        std::copy_n(top, n, at(statistics, 0, b, h, q));
        std::copy_n(total, n, at(statistics, 1, b, h, q));
    }
}

// Write the scores of 16 keys for some queries, whose rows are `columns` apart, to rows that are `width` apart.
static void scores_of_keys(const float* queries, int64_t columns, const float* const (&keys)[LANES], int64_t features,
                           int64_t count, float* scores, int64_t width) {
    Vector sums[FEW_QUERIES] = {};
    for (int64_t f = 0; f < features; f += LANES) {
        Vector block[LANES];
        UNROLLED (int j = 0; j < LANES; j++) block[j] = load(keys[j] + f, features - f);
        transpose(block);
        for (int64_t i = 0; i < count; i++) {
            Vector sum = sums[i];
            UNROLLED (int n = 0; n < LANES; n++) fma(sum, queries[i * columns + f + n], block[n]);
            sums[i] = sum;
        }
    }
    for (int64_t i = 0; i < count; i++) store(scores + i * width, sums[i]);
}

// The lanes of a vector are keys. A part is a head; keys and values are read once.
static void run_few_queries(const Record& r, int64_t head) {
    const Problem p(r);
    const Array& out = r.arrays[6];
    const int64_t b = head / p.heads, h = head % p.heads, key_head = p.key_head(h);
    int64_t first_key = 0, end = p.keys;
    p.trim(b, h, first_key, end);
    const int64_t keys = end - first_key, width = padded(keys), columns = padded(p.values);
    Workspace workspace(p.queries * (padded(p.features) + width + columns) + keys * LANES);
    float *queries = workspace.take(p.queries, padded(p.features)), *scores = workspace.take(p.queries, width);
    float *sums = workspace.take(p.queries, columns), *rest = workspace.take(keys, LANES), inverse[FEW_QUERIES];
    copy_rows(at(p.query, b, h), row_stride(p.query), p.queries, p.features, p.scale, queries);
    for (int64_t k = 0; k < keys; k += LANES) {
        const float* rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = at(p.key, b, key_head, std::min(first_key + k + j, end - 1));
        for (int j = 0; j < LANES; j++)  // the values of these keys are needed next
            for (int64_t f = 0; f < p.values; f += LANES)
                __builtin_prefetch(at(p.value, b, key_head, std::min(first_key + k + j, end - 1), f));
        scores_of_keys(queries, padded(p.features), rows, p.features, p.queries, scores + k, width);
    }
    const Vector lanes = lane_numbers();
    for (int64_t i = 0; i < p.queries; i++) {
        float* row = scores + i * width;
        const int64_t visible = (p.is_causal ? std::min(end, p.offset + i + 1) : end) - first_key;
        auto each = [&](const Array& x, auto* first, int64_t k, auto f) {  // 16 elements of x
            if (x) f(elements(first + (x.strides[3] ? k : 0), x.strides[3], keys - k));
        };
        Vector top = splat(LOWEST);
        float total = 0.0f;
        for (int64_t k = 0; k < width; k += LANES) {
            Vector s = load(row + k);
            each(p.bias, at<float>(p.bias, b, h, i, first_key), k, [&](Vector x) { s = s + x; });
            each(p.mask, at<int8_t>(p.mask, b, h, i, first_key), k,
                 [&](Vector x) { s = select(x == Vector{}, splat(MASKED), s); });
            if (k + LANES > visible) s = select(lanes < splat(visible - k), s, splat(MASKED));
            top = max(s, top);
            store(row + k, s);
        }
        top = splat(largest(top));
        for (int64_t k = 0; k < width; k += LANES) {
            Vector power = exp_of_nonpositive(load(row + k) - top);
            store(row + k, power);
            for (int e = 0; e < LANES; e++) total += row[k + e];
            each(p.dropout_mask, at<int8_t>(p.dropout_mask, b, h, i, first_key), k,
                 [&](Vector keep) { power = select(keep == Vector{}, Vector{}, power * p.dropout_scale); });
            store(row + k, power);
        }
        inverse[i] = total == 0.0f ? 0.0f : 1.0f / total;
    }
    const int64_t whole = p.values / LANES * LANES, stride = row_stride(p.value);
    const float* values = at(p.value, b, key_head, first_key);
    const Product product = {scores, width, 1, values, stride, sums, columns};
    if (p.queries == 1) multiply<ZERO, 1, VECTORS_OF_ONE_ROW>(product, 1, keys, whole);
    else multiply<ZERO>(product, p.queries, keys, whole);
    if (whole < p.values) {
        copy_rows(values + whole, stride, keys, p.values - whole, 1.0f, rest);
        multiply<ZERO>({scores, width, 1, rest, LANES, sums + whole, columns}, p.queries, keys, LANES);
    }
    for (int64_t i = 0; i < p.queries; i++)
        for (int64_t j = 0; j < p.values; j += LANES)
            store(at(out, b, h, i, j), load(sums + i * columns + j) * inverse[i], p.values - j);
}

static const char* broadcast(Array& x, Type type, const int64_t (&shape)[4]) {
    if (!x) return nullptr;
    REQUIRE(x.type == type && x.ndim <= 4, "expected a mask of bool or a bias of float32, of at most four axes");
    Array full = x;
    full.ndim = 4;
    for (int i = 0; i < 4; i++) {
        const int own = i - (4 - x.ndim);
        const int64_t size = own < 0 ? 1 : x.shape[own];
        REQUIRE(size == shape[i] || size == 1, "a mask or bias does not broadcast to (batch, heads, queries, keys)");
        full.shape[i] = shape[i];
        full.strides[i] = size == 1 ? 0 : x.strides[own];
    }
    REQUIRE(full.size() == 0 || full.strides[3] == 0 || full.strides[3] == x.itemsize(), "the keys of a mask or bias are not contiguous");
    x = full;
    return nullptr;
}

static const char* check_heads(const Array& x, int64_t batch, int64_t heads, int64_t length, int64_t features) {
    REQUIRE(x && x.type == FLOAT32 && x.ndim == 4, "expected float32 arrays of four axes");
    REQUIRE(x.shape[0] == batch && x.shape[1] == heads && x.shape[2] == length && x.shape[3] == features,
            "the shapes do not match");
    REQUIRE(features <= 1 || x.size() == 0 || x.strides[3] == sizeof(float), "features are not contiguous");
    return nullptr;
}

#define CHECK(call) do { if (const char* error = call) return error; } while (0)

// query, key, value, mask, bias, dropout_mask, out, statistics of both directions
static const char* check_common(Record& r) {
    const Array &query = r.arrays[0], &key = r.arrays[1], &value = r.arrays[2], &out = r.arrays[6];
    REQUIRE(query.ndim == 4 && key.ndim == 4 && value.ndim == 4, "expected arrays of four axes");
    const int64_t shape[4] = {query.shape[0], query.shape[1], query.shape[2], key.shape[2]};
    CHECK(check_heads(query, shape[0], shape[1], shape[2], query.shape[3]));
    CHECK(check_heads(key, shape[0], key.shape[1], shape[3], query.shape[3]));
    CHECK(check_heads(value, shape[0], key.shape[1], shape[3], value.shape[3]));
    CHECK(check_heads(out, shape[0], shape[1], shape[2], value.shape[3]));
    REQUIRE(shape[1] == 0 || (key.shape[1] > 0 && shape[1] % key.shape[1] == 0), "heads do not share keys evenly");
    CHECK(broadcast(r.arrays[3], BOOL, shape));
    CHECK(broadcast(r.arrays[4], FLOAT32, shape));
    CHECK(broadcast(r.arrays[5], BOOL, shape));
    const Array& statistics = r.arrays[7];
    REQUIRE(!statistics || (statistics.type == FLOAT32 && statistics.ndim == 4 && statistics.is_contiguous() &&
                            statistics.shape[0] == 2 && statistics.shape[1] == shape[0] &&
                            statistics.shape[2] == shape[1] && statistics.shape[3] == shape[2]),
            "expected contiguous statistics of shape (2, batch, heads, queries)");
    return nullptr;
}

constexpr int64_t GRAIN = 200000;  // multiplications

// Compute attention. statistics: the largest score of each query, and the inverse of its sum of exponentials; their
// logsumexp would round the sum away beside a large negative score. i0: causal; n0: scale; n1: 1 / keep probability.
static const char* check_attention(Record& r) {
    CHECK(check_common(r));
    const Problem p(r);
    const bool few = p.queries <= FEW_QUERIES && !r.arrays[7];  // the derivative computes the scores as for many
    const int64_t size = few ? LANES : queries_of_block(p.keys), blocks = few ? 1 : (p.queries + size - 1) / size;
    const int64_t count = p.queries ? p.query.shape[0] * p.heads * blocks : 0;
    split(r, count, std::min(padded(p.queries), size) * p.keys * (p.features + p.values), GRAIN);
    r.plan[1] = count;
    r.plan[2] = few;
    return nullptr;
}
static void run_attention(const Record& r, int part) {
    const int64_t first = part * r.plan[0], end = std::min(first + r.plan[0], r.plan[1]);
    for (int64_t item = first; item < end; item++) (r.plan[2] ? run_few_queries : run_many_queries)(r, item);
}

// --- derivative -------------------------------------------------------------------------------------------------------

// Sums for one head of y, (batch, heads, length, features): y itself if its rows are whole vectors.
class Sums {
    const Array& y;
    const int64_t b, h, columns;
    const bool is_direct;
    float* first;

public:
    const int64_t stride;

    Sums(const Array& y, int64_t b, int64_t h, Workspace& workspace)
        : y(y), b(b), h(h), columns(padded(y.shape[3])), is_direct(columns == y.shape[3]),
          first(is_direct ? at(y, b, h) : workspace.take(y.shape[2], columns)), stride(is_direct ? row_stride(y) : columns) {
        for (int64_t i = 0; i < y.shape[2]; i++) std::fill_n(row(i), columns, 0.0f);
    }
    float* row(int64_t i) const { return first + i * stride; }
    void write() const {
        for (int64_t i = 0; i < y.shape[2] && !is_direct; i++)
            for (int64_t j = 0; j < y.shape[3]; j += LANES) store(at(y, b, h, i, j), load(row(i) + j), y.shape[3] - j);
    }
};

// With P the weights, P' the weights after dropout, and dP the cotangent of P, which is g V^T times the dropout mask and
// its scale: dV = P'^T g, dS = P (dP - delta), where delta = sum(g out); dQ = dS K, dK = dS^T Q.
// A part is a head of the keys, with all heads of the queries that share it, in their order.
static void run_attention_vjp(const Record& r, int part) {
    const Problem p(r);
    const Array &out = r.arrays[6], &statistics = r.arrays[7], &g = r.arrays[8];
    const Array &dquery = r.arrays[9], &dkey = r.arrays[10], &dvalue = r.arrays[11], &dbias = r.arrays[12];
    const int64_t key_heads = p.key.shape[1], group = p.heads / key_heads, b = part / key_heads, key_head = part % key_heads;
    const int64_t most = std::min(padded(p.queries), QUERIES), columns = padded(p.features), value_columns = padded(p.values);
    Workspace workspace(most * (2 * p.features + p.values + columns + value_columns + 2 * KEYS + 4) +
                        p.keys * (columns + value_columns));
    const Sums dk(dkey, b, key_head, workspace), dv(dvalue, b, key_head, workspace);
    float *q_rows = workspace.take(most, columns), *g_rows = workspace.take(most, value_columns);
    float *q_columns = workspace.take(p.features, most), *g_columns = workspace.take(p.values, most);
    float *dq = workspace.take(p.features, most), *weights = workspace.take(KEYS, most), *dscores = workspace.take(KEYS, most);
    float *top = workspace.take(1, most), *inverse = workspace.take(1, most), *delta = workspace.take(1, most);
    float* scale = workspace.take(1, most);
    std::fill_n(scale, most, p.scale);
    for (int64_t h = key_head * group; h < (key_head + 1) * group; h++)
        for (int64_t q = 0; q < p.queries; q += QUERIES) {
            const int64_t n = std::min(QUERIES, p.queries - q), lanes = padded(n);
            copy_rows(at(p.query, b, h, q), row_stride(p.query), n, p.features, p.scale, q_rows);
            copy_rows(at(g, b, h, q), row_stride(g), n, p.values, 1.0f, g_rows);
            copy_transposed(q_rows, columns, n, p.features, 1.0f, q_columns, lanes);
            copy_transposed(g_rows, value_columns, n, p.values, 1.0f, g_columns, lanes);
            for (int64_t i = 0; i < lanes; i++) {
                const bool is_query = i < n;
                top[i] = is_query ? *at(statistics, 0, b, h, q + i) : 0.0f;
                inverse[i] = is_query ? *at(statistics, 1, b, h, q + i) : 0.0f;
                Vector total = {};
                for (int64_t j = 0; is_query && j < p.values; j += LANES)
                    fma(total, load(at(out, b, h, q + i, j), p.values - j), load(g_rows + i * value_columns + j));
                delta[i] = sum(total);
            }
            std::fill_n(dq, p.features * lanes, 0.0f);
            p.each_tile(b, h, q, n, [&](int64_t k, int64_t m) {
                const Tile tile = {b, h, q, n, k, m, lanes, weights};
                const float *keys = at(p.key, b, key_head, k), *values = at(p.value, b, key_head, k);
                p.scores(tile, q_columns);
                multiply<ZERO>({values, row_stride(p.value), 1, g_columns, lanes, dscores, lanes}, m, p.values, lanes);
                p.drop(tile, dscores);
                for (int64_t j = 0; j < m; j++)
                    for (int64_t i = 0; i < lanes; i += LANES) {
                        float *w = weights + j * lanes + i, *d = dscores + j * lanes + i;
                        const Vector weight = exp_of_nonpositive(load(w) - load(top + i)) * load(inverse + i);
                        store(w, weight);
                        store(d, weight * (load(d) - load(delta + i)));
                    }
                p.drop(tile, weights);
                multiply<SUMS>({weights, lanes, 1, g_rows, value_columns, dv.row(k), dv.stride}, m, n, value_columns);
                multiply<SUMS>({dscores, lanes, 1, q_rows, columns, dk.row(k), dk.stride}, m, n, columns);
                multiply<SUMS>({keys, 1, row_stride(p.key), dscores, lanes, dq, lanes}, p.features, m, lanes);
                if (dbias) {
                    float ones[KEYS];
                    std::fill_n(ones, KEYS, 1.0f);
                    write_transposed(dscores, lanes, n, m, ones, at(dbias, b, h, q, k), row_stride(dbias));
                }
            });
            write_transposed(dq, lanes, n, p.features, scale, at(dquery, b, h, q), row_stride(dquery));
        }
    dk.write();
    dv.write();
}

// Compute the cotangents of attention from the output, the statistics and g, the cotangent of the output. dbias, of
// shape (batch, heads, queries, keys), must be zero before, as hidden tiles are not written.
static const char* check_attention_vjp(Record& r) {
    CHECK(check_common(r));
    const Array &query = r.arrays[0], &key = r.arrays[1], &value = r.arrays[2], &dbias = r.arrays[12];
    REQUIRE(r.arrays[7], "expected statistics");
    auto check_like = [&](int i, const Array& x, int64_t features) {
        return check_heads(r.arrays[i], x.shape[0], x.shape[1], x.shape[2], features);
    };
    CHECK(check_like(8, query, value.shape[3]));
    CHECK(check_like(9, query, query.shape[3]));
    CHECK(check_like(10, key, key.shape[3]));
    CHECK(check_like(11, value, value.shape[3]));
    if (dbias) CHECK(check_like(12, query, key.shape[2]));
    r.parts = static_cast<int32_t>(query.shape[0] * key.shape[1]);
    return nullptr;
}

static const Operation operations[] = {
    {"attention", 1 << 6 | 1 << 7, check_attention, run_attention},
    {"attention_vjp", 0xf << 9, check_attention_vjp, run_attention_vjp},
};
extern const Family attention_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA

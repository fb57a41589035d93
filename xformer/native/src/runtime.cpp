// Threads that execute records, and the interface for Python.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>
#include <pthread.h>
#include <sched.h>
#include "record.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void pause_cpu() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void pause_cpu() { asm volatile("isb"); }
#else
static inline void pause_cpu() {}
#endif

Sgemm blas_sgemm = nullptr;
bool is_reproducible = false;
float halves[1 << 16];

// --- instruction sets -------------------------------------------------------------------------------------------------

namespace baseline { extern const Family* const families[]; }
namespace avx2 { extern const Family* const families[]; }
namespace avx512 { extern const Family* const families[]; }

namespace {

std::vector<Operation> operations;  // of the chosen level; filled once by xf_open
const char* level = "";

void fill_halves() {
    for (uint32_t h = 0; h < 1 << 16; h++) {
        uint32_t bits = (h & 0x7fffu) << 13;
        if (bits >= 0x0f800000u) bits += 0x70000000u;  // infinity and NaN
        std::memcpy(halves + h, &bits, 4);
        if (bits < 0x0f800000u) halves[h] *= 0x1p112f;  // also of subnormal numbers
        if (h & 0x8000u) halves[h] = -halves[h];
    }
}

struct Level {
    const char* name;
    bool is_supported;                // by the processor
    const Family* const* families;    // null if the library was compiled without it
};

// Take the best level, or the one that is wanted; return an error message or null.
const char* choose_level(const char* wanted) {
    static std::string error;
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
#else
    const bool has_avx2 = false, has_avx512 = false;
#endif
    Level levels[] = {{"avx512", has_avx512, nullptr}, {"avx2", has_avx2, nullptr}, {"baseline", true, nullptr}};
#if defined(HAS_avx512)
    levels[0].families = avx512::families;
#endif
#if defined(HAS_avx2)
    levels[1].families = avx2::families;
#endif
#if defined(HAS_baseline)
    levels[2].families = baseline::families;
#endif
    error = "it was compiled for a newer processor: run python -m xformer.native.build";
    for (const Level& each : levels) {
        if (*wanted && std::strcmp(wanted, each.name)) continue;
        if (*wanted && !each.is_supported) error = std::string("this processor has no ") + wanted;
        else if (*wanted && !each.families) error = std::string("it was compiled without ") + wanted + ": run python -m xformer.native.build --all";
        if (!each.is_supported || !each.families) continue;
        level = each.name;
        operations.clear();
        for (const Family* const* family = each.families; *family; family++)
            operations.insert(operations.end(), (*family)->operations, (*family)->operations + (*family)->count);
        return nullptr;
    }
    return error.c_str();
}

// --- programs ---------------------------------------------------------------------------------------------------------

struct Range { const char *begin, *end; };

Range range_of(const Array& x) {
    const char *begin = x.data, *end = x.data + x.itemsize();
    for (int i = 0; i < x.ndim; i++) {
        if (x.shape[i] == 0) return {x.data, x.data};
        const int64_t extent = (x.shape[i] - 1) * x.strides[i];
        (extent < 0 ? begin : end) += extent;
    }
    return {begin, end};
}

bool overlap(const std::vector<Range>& a, const std::vector<Range>& b) {
    for (const Range& x : a) for (const Range& y : b) if (x.begin < y.end && y.begin < x.end) return true;
    return false;
}

// Records of one part each that run one after the other in one thread, or a single record of several parts.
struct Task {
    std::vector<int> records;
    std::vector<Range> reads, writes;
    bool conflicts_with(const Task& other) const {
        return overlap(writes, other.writes) || overlap(writes, other.reads) || overlap(reads, other.writes);
    }
    void append(const Task& other) {
        records.insert(records.end(), other.records.begin(), other.records.end());
        reads.insert(reads.end(), other.reads.begin(), other.reads.end());
        writes.insert(writes.end(), other.writes.begin(), other.writes.end());
    }
};

// In one thread, a whole product takes less time than its parts.
void run_all_parts(const Record& r) {
    if (r.uses_blas) return operations[r.operation].run(r, -1);
    for (int part = 0; part < r.parts; part++) operations[r.operation].run(r, part);
}

struct Unit { int first, count, part; };  // records order[first], ..., of which `part` is run

// Tasks that may run at the same time. A group begins when all units of the group before it are done.
struct alignas(64) Group {
    int first = 0, end = 0;  // units
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<int> done{0};
};

constexpr int SPINS_BEFORE_YIELD = 2000, SPINS_BEFORE_SLEEP = 20000;

template <class F> void wait_until(F is_true) {
    for (int i = 0; !is_true(); i++) {
        if (i < SPINS_BEFORE_YIELD) pause_cpu(); else sched_yield();
    }
}

}  // namespace

class Program {
    std::vector<int> order;
    std::vector<Unit> units;
    std::deque<Group> groups;
    std::vector<Task> tasks;  // of the group that is being made

    void end_group() {
        if (tasks.empty()) return;
        // Chains first: they take longest.
        std::stable_sort(tasks.begin(), tasks.end(),
                         [](const Task& a, const Task& b) { return a.records.size() > b.records.size(); });
        Group& group = groups.emplace_back();
        group.first = static_cast<int>(units.size());
        for (const Task& task : tasks) {
            const int first = static_cast<int>(order.size());
            order.insert(order.end(), task.records.begin(), task.records.end());
            const int parts = records[task.records[0]].parts;
            if (parts <= 1) units.push_back({first, static_cast<int>(task.records.size()), 0});
            else for (int part = 0; part < parts; part++) units.push_back({first, 1, part});
        }
        group.end = static_cast<int>(units.size());
        tasks.clear();
    }

    void run_unit(const Unit& unit) const {
        for (int i = unit.first; i < unit.first + unit.count; i++) {
            const Record& r = records[order[i]];
            if (r.parts > 0) operations[r.operation].run(r, unit.part);
        }
    }

public:
    std::vector<Record> records;
    bool uses_blas = false;
    std::mutex running;  // two threads cannot run one program at the same time

    void append(const Record& r) {
        const int number = static_cast<int>(records.size());
        records.push_back(r);
        uses_blas |= r.uses_blas;
        Task task{{number}, {}, {}};
        for (int i = 0; i < MAX_ARRAYS; i++)
            if (r.arrays[i])
                (operations[r.operation].outputs >> i & 1 ? task.writes : task.reads).push_back(range_of(r.arrays[i]));
        std::vector<size_t> hits;
        bool is_serial = r.parts <= 1;
        for (size_t i = 0; i < tasks.size(); i++)
            if (tasks[i].conflicts_with(task)) {
                hits.push_back(i);
                is_serial = is_serial && records[tasks[i].records[0]].parts <= 1;
            }
        if (hits.empty()) {
            tasks.push_back(task);
        } else if (is_serial) {  // one chain of all tasks that it depends on
            for (size_t i = 1; i < hits.size(); i++) tasks[hits[0]].append(tasks[hits[i]]);
            tasks[hits[0]].append(task);
            for (size_t i = hits.size(); i-- > 1;) tasks.erase(tasks.begin() + hits[i]);
        } else {
            end_group();
            tasks.push_back(task);
        }
    }

    void close() { end_group(); }

    void run_alone() const {
        for (int number : order) run_all_parts(records[number]);
    }

    void reset() {
        for (Group& group : groups) {
            group.next.store(0, std::memory_order_relaxed);
            group.done.store(0, std::memory_order_relaxed);
        }
    }

    // Every thread of a run calls this.
    void walk() {
        for (Group& group : groups) {
            const int count = group.end - group.first;
            int finished = 0;
            for (int i; (i = group.next.fetch_add(1, std::memory_order_relaxed)) < count; finished++)
                run_unit(units[group.first + i]);
            if (finished) group.done.fetch_add(finished, std::memory_order_release);
            wait_until([&] { return group.done.load(std::memory_order_acquire) == count; });
        }
    }

    bool is_parallel() const { return units.size() > groups.size(); }
    size_t num_groups() const { return groups.size(); }
};

namespace {

// Helpers poll for about a millisecond after a run, then sleep. A helper joins a run only while it is open; a caller
// never waits for helpers to wake up, but at the end of a run for those that have joined it.
class Pool {
    std::mutex mutex, owner;
    std::condition_variable wake;
    std::atomic<uint64_t> number{0};
    std::atomic<Program*> open{nullptr};
    std::atomic<int> joined{0}, asleep{0}, helpers{0};
    int started = 0;

    void help(int index) {
        uint64_t last = 0;
        for (int polls = 0;;) {
            const uint64_t now = number.load();
            if (now != last && index < helpers.load()) {
                last = now;
                joined++;
                if (Program* program = open.load()) program->walk();
                joined--;
                polls = 0;
            } else if (++polls < SPINS_BEFORE_SLEEP) {
                pause_cpu();
            } else {
                std::unique_lock<std::mutex> lock(mutex);
                asleep++;
                wake.wait(lock, [&] { return number.load() != last && index < helpers.load(); });
                asleep--;
                polls = 0;
            }
        }
    }

    void start(int count) {
        try {
            for (; started < count; started++) std::thread(&Pool::help, this, started).detach();
        } catch (const std::system_error&) {  // the process has too many threads: run with those that there are
        }
    }

public:
    void run(Program& program, int num_threads) {
        if (num_threads < 2 || !program.is_parallel() || !owner.try_lock())
            return program.run_alone();  // also if another thread of Python has the helpers
        start(num_threads - 1);
        helpers = std::min(num_threads - 1, started);
        program.reset();
        open = &program;
        number++;
        if (asleep > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        program.walk();
        open = nullptr;
        wait_until([&] { return joined.load() == 0; });
        owner.unlock();
    }
};

// The number of threads of the BLAS library. It is 1 while a record calls that library, whose rounding may depend on it.
struct BlasThreads {
    int (*get)() = nullptr;
    void (*set)(int) = nullptr;
    std::mutex mutex;
    int users = 0, before = 1;  // runs that use the library; the number of threads without them

    void begin() {
        std::lock_guard<std::mutex> lock(mutex);
        if (users++ == 0 && (before = get()) != 1) set(1);
    }
    void end() {
        std::lock_guard<std::mutex> lock(mutex);
        if (--users == 0 && before != 1) set(before);
    }
} blas_threads;

struct OneBlasThread {
    const bool is_needed;
    explicit OneBlasThread(bool uses_blas) : is_needed(uses_blas && blas_threads.get) {
        if (is_needed) blas_threads.begin();
    }
    ~OneBlasThread() { if (is_needed) blas_threads.end(); }
};

Pool* pool = nullptr;  // never destroyed, as its threads run until the process ends

Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });  // a child has none of the threads
    });
    return *pool;
}

// --- arrays of NumPy --------------------------------------------------------------------------------------------------

// Where CPython and NumPy keep what describes an array. xformer/native/__init__.py checks that this holds.
struct Layout {
    int64_t head;         // size of PyObject; the type is its last member
    int64_t tuple_items;  // offset of the items of a tuple
    const void *none, *array_type;
    int32_t types[32];    // Type by the number of a dtype
};
Layout layout;

struct ArrayObject {  // PyArrayObject_fields without its head
    char* data;
    int32_t ndim;
    int64_t *shape, *strides;
    void *base, *dtype;
    int32_t flags;
};
constexpr int ALIGNED = 0x0100, WRITEABLE = 0x0400;

template <class T> T at(const void* object, int64_t offset) {
    return *reinterpret_cast<const T*>(static_cast<const char*>(object) + offset);
}

const char* read_array(const void* object, bool is_output, Array& x) {
    std::memset(&x, 0, sizeof x);
    if (object == layout.none) return nullptr;
    REQUIRE((at<const void*>(object, layout.head - 8) == layout.array_type), "not an array of NumPy");
    const auto& array = *reinterpret_cast<const ArrayObject*>(static_cast<const char*>(object) + layout.head);
    REQUIRE(array.ndim <= MAX_DIMS, "an array has too many axes");
    REQUIRE(array.flags & ALIGNED, "an array is not aligned in memory");
    REQUIRE(!is_output || array.flags & WRITEABLE, "an output is read-only");
    const int64_t fields = layout.head + 8;  // of the dtype: kind, type, byteorder, flags, number
    const char order = at<char>(array.dtype, fields + 2);
    const int32_t number = at<int32_t>(array.dtype, fields + 4);
    x.type = order == '>' || number < 0 || number >= 32 ? OTHER : layout.types[number];
    x.data = array.data;
    x.ndim = array.ndim;
    for (int i = 0; i < array.ndim; i++) x.shape[i] = array.shape[i], x.strides[i] = array.strides[i];
    return nullptr;
}

const char* make_record(int operation, const void* arrays, const int64_t* integers, const double* numbers, Record& r) {
    const int64_t count = at<int64_t>(arrays, layout.head);
    REQUIRE(count <= MAX_ARRAYS, "too many arrays");
    std::memset(&r, 0, sizeof r);
    r.operation = operation;
    r.parts = 1;
    for (int i = 0; i < count; i++) {
        const void* item = at<const void*>(arrays, layout.tuple_items + 8 * i);
        if (const char* error = read_array(item, operations[operation].outputs >> i & 1, r.arrays[i])) return error;
    }
    std::copy(integers, integers + 4, r.integers);
    std::copy(numbers, numbers + 4, r.numbers);
    return operations[operation].check(r);
}

const char* status_of(const Program& program) {
    for (const Record& r : program.records)
        if (r.status) {
            r.status = 0;
            return "an index is out of range";
        }
    return nullptr;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))
#define ARGUMENTS int operation, const void *arrays, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double n0, double n1, double n2, double n3

extern "C" {

// Returns an error message or null.
EXPORT const char* xf_open(const Layout* given, const char* wanted) {
    layout = *given;
    fill_halves();
    return choose_level(wanted);
}
EXPORT const char* xf_key() { return KEY; }  // build.py looks for it in the file
EXPORT const char* xf_level() { return level; }
EXPORT const char* xf_name(int operation) {
    return operation < (int)operations.size() ? operations[operation].name : nullptr;
}
EXPORT int64_t xf_outputs(int operation) { return operations[operation].outputs; }
EXPORT void xf_set_reproducible(int mode) { is_reproducible = mode; }
EXPORT void xf_set_blas(Sgemm sgemm, int (*get_threads)(), void (*set_threads)(int)) {
    blas_sgemm = sgemm, blas_threads.get = get_threads, blas_threads.set = set_threads;
    // A child has none of the threads that use the library.
    pthread_atfork([] { blas_threads.mutex.lock(); }, [] { blas_threads.mutex.unlock(); }, [] {
        if (blas_threads.users && blas_threads.before != 1) blas_threads.set(blas_threads.before);
        blas_threads.users = 0;
        blas_threads.mutex.unlock();
    });
}
// The number of threads that the BLAS library has, or will have when nothing uses it.
EXPORT int xf_blas_threads() {
    std::lock_guard<std::mutex> lock(blas_threads.mutex);
    return blas_threads.users ? blas_threads.before : blas_threads.get();
}
EXPORT void xf_set_blas_threads(int count) {
    std::lock_guard<std::mutex> lock(blas_threads.mutex);
    if (blas_threads.users) blas_threads.before = count;
    else blas_threads.set(count);
}

// Return the pointer, the number of axes, shape and strides of the first array of a tuple, for a check of the layout.
EXPORT const char* xf_describe(const void* arrays, int64_t* result) {
    Array x;
    if (const char* error = read_array(at<const void*>(arrays, layout.tuple_items), true, x)) return error;
    *result++ = at<int64_t>(arrays, layout.head);
    *result++ = reinterpret_cast<int64_t>(x.data);
    *result++ = x.type;
    *result++ = x.ndim;
    for (int i = 0; i < x.ndim; i++) result[i] = x.shape[i], result[x.ndim + i] = x.strides[i];
    return nullptr;
}

// Run one operation; return an error message or null.
EXPORT const char* xf_call(ARGUMENTS, int threads) {
    const int64_t integers[] = {i0, i1, i2, i3};
    const double numbers[] = {n0, n1, n2, n3};
    thread_local Record r;
    if (const char* error = make_record(operation, arrays, integers, numbers, r)) return error;
    const OneBlasThread limit(r.uses_blas);
    if (r.parts > 1 && threads > 1) {
        Program program;
        program.append(r);
        program.close();
        the_pool().run(program, threads);
        return status_of(program);
    }
    run_all_parts(r);
    return r.status ? "an index is out of range" : nullptr;
}

EXPORT Program* xf_program() { return new Program; }
EXPORT const char* xf_append(Program* program, ARGUMENTS) {
    const int64_t integers[] = {i0, i1, i2, i3};
    const double numbers[] = {n0, n1, n2, n3};
    Record r;
    if (const char* error = make_record(operation, arrays, integers, numbers, r)) return error;
    program->append(r);
    return nullptr;
}
EXPORT int64_t xf_close(Program* program) {
    program->close();
    return static_cast<int64_t>(program->num_groups());
}
EXPORT const char* xf_run(Program* program, int threads, int64_t count) {
    std::lock_guard<std::mutex> lock(program->running);
    const OneBlasThread limit(program->uses_blas);
    for (; count > 0; count--) the_pool().run(*program, threads);
    return status_of(*program);
}
EXPORT void xf_free(Program* program) { delete program; }

}

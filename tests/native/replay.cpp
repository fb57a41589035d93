// Run recorded operations with this processor's library, and compare the bits of their outputs: replay FILE LIBRARY.
//
// The library reads arrays from objects of Python; here are as few of their fields as it reads. FILE has for each
// operation its name, arrays, numbers and expected outputs, as tests/native/test_processors.py writes them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>
#include <dlfcn.h>

struct Layout { int64_t head, tuple_items; const void *none, *array_type; int32_t types[32]; };
struct Dtype { int64_t count; const void *type, *scalar; char kind, letter, order, flags; int32_t number; };
struct Array {
    int64_t count;
    const void* type;
    char* data;
    int32_t ndim;
    int64_t *shape, *strides;
    void* base;
    const Dtype* dtype;
    int32_t flags;
};

static FILE* file;

template <class T> std::vector<T> read(int64_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, file) != static_cast<size_t>(count)) std::exit(2);
    return values;
}

int main(int, char** arguments) {
    file = std::fopen(arguments[1], "rb");
    void* library = dlopen(arguments[2], RTLD_NOW);
    if (!file || !library) return std::printf("%s\n", library ? "no file" : dlerror()), 2;
    const auto open = reinterpret_cast<const char* (*)(const Layout*, const char*)>(dlsym(library, "xf_open"));
    const auto name_of = reinterpret_cast<const char* (*)(int)>(dlsym(library, "xf_name"));
    const auto call = reinterpret_cast<const char* (*)(int, const void*, int64_t, int64_t, int64_t, int64_t, double, double, double,
                                                       double, int)>(dlsym(library, "xf_call"));
    static char none, array_type;
    Layout layout{16, 24, &none, &array_type, {}};
    for (int i = 0; i < 32; i++) layout.types[i] = i;
    if (const char* error = open(&layout, "")) return std::printf("%s\n", error), 2;
    std::map<std::string, int> operations, different;
    for (int i = 0; name_of(i); i++) operations[name_of(i)] = i;

    int total = 0;
    for (int c; (c = std::getc(file)) != EOF; total++) {
        std::ungetc(c, file);
        const std::string name = read<char>(32).data();
        const auto integers = read<int64_t>(4);
        const auto numbers = read<double>(4);
        struct Memory { std::vector<int64_t> shape, strides; Dtype dtype; Array array; char* data = nullptr; int64_t size; };
        std::vector<Memory> arrays(read<int64_t>(1)[0]);
        std::vector<const void*> tuple{nullptr, nullptr, reinterpret_cast<void*>(arrays.size())};
        for (Memory& x : arrays) {
            const auto head = read<int64_t>(5);  // type or -1, number of axes, bytes of an element, all, same array as
            if (head[0] < 0) { tuple.push_back(&none); continue; }
            x.shape = read<int64_t>(head[1]), x.strides = x.shape, x.size = head[3];
            int64_t stride = head[2];
            for (int i = head[1]; i-- > 0; stride *= x.shape[i]) x.strides[i] = stride;
            Memory& same = head[4] < 0 ? x : arrays[head[4]];
            if (!same.data) same.data = static_cast<char*>(std::aligned_alloc(64, (x.size + 127) / 64 * 64));
            x.data = same.data;
            const auto bytes = read<char>(x.size);
            std::memcpy(x.data, bytes.data(), x.size);
            x.dtype = {1, nullptr, nullptr, 0, 0, '<', 0, static_cast<int32_t>(head[0])};
            x.array = {1, &array_type, x.data, static_cast<int32_t>(head[1]), x.shape.data(), x.strides.data(), nullptr, &x.dtype, 0x0500};
            tuple.push_back(&x.array);
        }
        const char* error = call(operations.at(name), tuple.data(), integers[0], integers[1], integers[2], integers[3], numbers[0],
                                 numbers[1], numbers[2], numbers[3], 2);
        if (error) std::printf("%s: %s\n", name.c_str(), error);
        bool is_same = !error;
        for (int64_t output : read<int64_t>(read<int64_t>(1)[0])) {
            const Memory& x = arrays[output];
            is_same &= std::memcmp(read<char>(x.size).data(), x.data, x.size) == 0;
        }
        different[name] += !is_same;  // and the memory is never freed
    }
    for (const auto& [name, count] : different) if (count) std::printf("different: %s (%d times)\n", name.c_str(), count);
    std::printf("%d operations of %zu kinds\n", total, different.size());
}

// Lets a C++ compiler build the CUDA sources, and runs their kernels on the CPU, a block after the other. Each thread of
// a block is a coroutine that others take over from where it waits: at __syncthreads, and in shuffles, through which a
// warp exchanges values. A barrier that not all threads reach ends the launch with an error.
//
// Warps run as far as they can, from the first to the last or the other way round: what depends on it lacks a barrier.

#pragma once
#undef _FORTIFY_SOURCE  // which takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define CUDA_ON_HOST
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct Dimension {
    unsigned x = 1;
};
static Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

const int WARP = 32;
const size_t STACK_BYTES = 64 * 1024;

struct Barrier {
    unsigned waiting = 0;
    unsigned long long passed = 0;
};

struct Warp {
    Barrier barrier;
    unsigned char values[WARP][16];
};

struct Thread {
    jmp_buf place;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool started = false, done = false;
};

static jmp_buf scheduler;
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Barrier of_block;
static bool moved;  // whether some thread got on since it was last asked
static void (*entry)();

// Coroutines switch by jumps: swapcontext would call the kernel of the system each time.
static void leave()
{
    const unsigned self = threadIdx.x;
    if (!_setjmp(threads[self].place)) _longjmp(scheduler, 1);
    threadIdx.x = self;
}

static void enter(Thread& thread)
{
    if (!_setjmp(scheduler)) _longjmp(thread.place, 1);
}

static void run_launches()
{
    for (;;) {
        leave();
        entry();
        threads[threadIdx.x].done = moved = true;
    }
}

static void start(Thread& thread)
{
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack.get();
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, run_launches, 0);
    if (!_setjmp(scheduler)) setcontext(&context);
    thread.started = true;
}

static void wait(Barrier& barrier, unsigned members)
{
    const unsigned long long now = barrier.passed;
    if (++barrier.waiting == members) {
        barrier.waiting = 0;
        ++barrier.passed;
        moved = true;
    }
    while (barrier.passed == now) leave();
}

// Call a kernel with arguments given as CUDA takes them: the addresses of their values.
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}

template <typename... A> struct Launch {
    static void (*kernel)(A...);
    static void** arguments;
    static void thread() { call(kernel, arguments, std::index_sequence_for<A...>()); }
};
template <typename... A> void (*Launch<A...>::kernel)(A...);
template <typename... A> void** Launch<A...>::arguments;

static bool run_block(unsigned count, bool backwards)
{
    of_block = Barrier();
    warps.assign(count / WARP, Warp());
    for (threadIdx.x = 0; threadIdx.x < count; ++threadIdx.x) {
        Thread& thread = threads[threadIdx.x];
        if (!thread.started) start(thread);
        thread.done = false;
    }
    for (bool running = true, any; running;) {
        running = any = false;
        for (unsigned first = 0; first < count; first += WARP) {
            do {  // a warp goes as far as it can before the next one
                moved = false;
                for (unsigned lane = 0; lane < WARP; ++lane) {
                    threadIdx.x = backwards ? count - 1 - first - lane : first + lane;
                    Thread& thread = threads[threadIdx.x];
                    if (!thread.done) {
                        running = true;
                        enter(thread);
                    }
                }
                any |= moved;
            } while (moved);
        }
        if (running && !any) {
            for (Thread& thread : threads) thread.started = false;
            return false;
        }
    }
    return true;
}

// Zero, or what went wrong: 1 for a barrier that not all threads reached.
template <typename... A>
int run(void (*kernel)(A...), long long blocks, long long count, bool backwards, void** arguments)
{
    Launch<A...>::kernel = kernel;
    Launch<A...>::arguments = arguments;
    entry = Launch<A...>::thread;
    while (threads.size() < (size_t)count) threads.emplace_back();
    blockDim.x = count;
    gridDim.x = blocks;
    for (long long block = 0; block < blocks; ++block) {
        blockIdx.x = backwards ? blocks - 1 - block : block;
        if (!run_block(count, backwards)) return 1;
    }
    return 0;
}

template <typename To, typename From> To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace on_host

static void __syncthreads() { on_host::wait(on_host::of_block, blockDim.x); }

static int __syncthreads_or(int value)
{
    static int any;
    any |= value;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}

template <typename W> W __shfl_xor_sync(unsigned, W value, int other)
{
    on_host::Warp& warp = on_host::warps[threadIdx.x / on_host::WARP];
    const int lane = threadIdx.x % on_host::WARP;
    std::memcpy(warp.values[lane], &value, sizeof value);
    on_host::wait(warp.barrier, on_host::WARP);
    std::memcpy(&value, warp.values[lane ^ other], sizeof value);
    on_host::wait(warp.barrier, on_host::WARP);
    return value;
}

static float __uint_as_float(unsigned bits) { return on_host::bits_as<float>(bits); }
static long long __double_as_longlong(double x) { return on_host::bits_as<long long>(x); }
static unsigned __float_as_uint(float x) { return on_host::bits_as<unsigned>(x); }

static float __fdividef(float x, float y) { return x / y; }
static unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
static int __ffs(int x) { return __builtin_ffs(x); }

// Half precision: five bits of exponent, ten of fraction.
static float half_to_float(unsigned short bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                      : std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -size : size;
}

static unsigned short float_to_half(float x)
{
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (x != x) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;  // nearer to what would be the next number than to the largest
    int exponent = 0;
    std::frexp(size, &exponent);  // size = [0.5, 1) 2^exponent
    if (size == 0.0f || exponent < -13) exponent = -13;  // subnormal numbers have the spacing of the smallest others
    const int steps = (int)std::nearbyint(std::ldexp(size, 11 - exponent));  // ties to even
    return sign | ((exponent + 13) * 1024 + steps);
}

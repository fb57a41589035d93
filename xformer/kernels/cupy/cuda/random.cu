// Random numbers that depend only on a key and a position, not on the device or the thread.

struct Block { unsigned word[4]; };

// Philox4x32-10 (Salmon et al., 2011, section 3.3).
__device__ inline Block philox(Block c, unsigned key0, unsigned key1)
{
    for (int round = 0; round < 10; ++round) {
        const unsigned a = 0xD2511F53, b = 0xCD9E8D57, x = c.word[0], y = c.word[2];
        c = Block{{__umulhi(b, y) ^ c.word[1] ^ key0, b * y, __umulhi(a, x) ^ c.word[3] ^ key1, a * x}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// The mask is true where 16 random bits are below `threshold`; k0 to k3 have 32 bits of the key each. A counter that is
// not null changes the key; a captured graph reads it anew in every replay.
template <typename T>
__global__ void dropout_mask(
    T* mask, long long size, long long threshold, long long k0, long long k1, long long k2, long long k3,
    const long long* counter)
{
    if (counter) {
        k0 ^= *counter & 0xffffffff;
        k1 ^= *counter >> 32;
    }
    const bool is_any = threshold > 0;
    const unsigned largest = ((unsigned)threshold << 16) - 1;  // of the numbers whose upper half is below the threshold
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * 16; i < size;
         i += (long long)gridDim.x * blockDim.x * 16) {
        Vector<unsigned, 4> keep = {};  // 16 bytes, lowest first
        for (int j = 0; j < 2; ++j) {   // blocks of 8 elements
            const long long position = i / 8 + j;
            const Block counter = {{(unsigned)position, (unsigned)(position >> 32), (unsigned)k2, (unsigned)k3}};
            const Block bits = philox(counter, (unsigned)k0, (unsigned)k1);
            for (int k = 0; k < 8; ++k)
                if (is_any && bits.word[k / 2] << (1 - k % 2) * 16 <= largest)
                    keep.element[2 * j + k / 4] |= 1u << k % 4 * 8;
        }
        if (size - i >= 16)
            *reinterpret_cast<Vector<unsigned, 4>*>(mask + i) = keep;
        else
            for (int k = 0; k < 16; ++k)
                if (k < size - i) mask[i + k] = keep.element[k / 4] >> k % 4 * 8 & 1;
    }
}

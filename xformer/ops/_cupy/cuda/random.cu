// Random numbers that depend only on a key and a position, not on the device or the thread.

struct Block { unsigned word[4]; };

// Philox4x32-10 (Salmon et al., 2011, section 3.3).
__device__ inline Block philox(Block c, unsigned key0, unsigned key1)
{
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * c.word[0], b = 0xCD9E8D57ull * c.word[2];
        const unsigned a_high = (unsigned)(a >> 32), b_high = (unsigned)(b >> 32);
        c = Block{{b_high ^ c.word[1] ^ key0, (unsigned)b, a_high ^ c.word[3] ^ key1, (unsigned)a}};
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
    for (long long position = blockIdx.x * (long long)blockDim.x + threadIdx.x; position * 8 < size;
         position += (long long)gridDim.x * blockDim.x) {
        const Block counter = {{(unsigned)position, (unsigned)(position >> 32), (unsigned)k2, (unsigned)k3}};
        const Block bits = philox(counter, (unsigned)k0, (unsigned)k1);
        unsigned long long bytes = 0;  // eight bytes, lowest first
        for (int k = 0; k < 8; ++k)
            bytes |= (unsigned long long)((bits.word[k / 2] >> k % 2 * 16 & 0xffff) < threshold) << 8 * k;
        if (size - position * 8 >= 8)
            ((unsigned long long*)mask)[position] = bytes;
        else
            for (int k = 0; k < size - position * 8; ++k) mask[position * 8 + k] = bytes >> 8 * k & 1;
    }
}

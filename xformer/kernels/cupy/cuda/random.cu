// Random numbers that depend on a key and on a place alone, whatever the device and whichever thread draws them.

struct Words { unsigned at[4]; };

// Philox4x32-10 (Salmon et al., 2011, section 3.3).
__device__ inline Words philox(Words c, unsigned key, unsigned other)
{
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * c.at[0], b = 0xCD9E8D57ull * c.at[2];
        c = Words{{(unsigned)(b >> 32) ^ c.at[1] ^ key, (unsigned)b, (unsigned)(a >> 32) ^ c.at[3] ^ other, (unsigned)a}};
        key += 0x9E3779B9u;
        other += 0xBB67AE85u;
    }
    return c;
}

// mask is true where 16 bits, of 65536 values, are below `accepted`; k0 to k3 are 32 bits of the key each.
template <typename T>
__global__ void keep(
    T* mask, long long size, long long accepted, long long k0, long long k1, long long k2, long long k3)
{
    for (long long place = blockIdx.x * (long long)blockDim.x + threadIdx.x; place * 8 < size;
         place += (long long)gridDim.x * blockDim.x) {
        const Words counter = {{(unsigned)place, (unsigned)(place >> 32), (unsigned)k2, (unsigned)k3}};
        const Words drawn = philox(counter, (unsigned)k0, (unsigned)k1);
        unsigned long long kept = 0;  // eight bytes, the first one lowest
        for (int k = 0; k < 8; ++k)
            kept |= (unsigned long long)((drawn.at[k / 2] >> k % 2 * 16 & 0xffff) < accepted) << 8 * k;
        if (size - place * 8 >= 8)
            ((unsigned long long*)mask)[place] = kept;
        else
            for (int k = 0; k < size - place * 8; ++k) mask[place * 8 + k] = kept >> 8 * k & 1;
    }
}

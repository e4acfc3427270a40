/* Eight floats at a time, with GCC's and clang's vector extensions: AVX2, NEON or whatever the processor has. */
#ifndef ETUDE_VECTOR_H
#define ETUDE_VECTOR_H
#include <stdint.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

static inline v8 choose(i8 mask, v8 yes, v8 no)
{
    i8 a, b;
    v8 result;
    memcpy(&a, &yes, sizeof a), memcpy(&b, &no, sizeof b);
    a = (a & mask) | (b & ~mask);
    memcpy(&result, &a, sizeof result);
    return result;
}

/* exp by Cephes' expf: x = n ln 2 + r, degree-6 polynomial in r; relative error below 2e-7 on the range used. */
static inline v8 exponential(v8 x)
{
    x = choose(x < splat(-87.0f), splat(-87.0f), x);
    x = choose(x > splat(88.0f), splat(88.0f), x);
    const v8 t = x * 1.44269504088896341f;
    const v8 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const v8 whole = (t + magic) - magic;
    v8 r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    v8 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const i8 bits = (__builtin_convertvector(whole, i8) + 127) << 23;
    v8 power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

#endif

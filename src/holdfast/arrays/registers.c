#include "native.h"

int holdfast_registers = 16;

/* Use registers of that many bytes, or the widest where that is 0; what a processor has not is not taken. */
int holdfast_width(int bytes)
{
    int most = __builtin_cpu_supports("avx512f") ? 64 : __builtin_cpu_supports("avx2") ? 32 : 16;
    holdfast_registers = bytes == 0 || bytes > most ? most : bytes;
    return holdfast_registers;
}

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    holdfast_width(0);
}

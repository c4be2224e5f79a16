/* What the files of this folder share. */

#ifndef HOLDFAST_NATIVE_H
#define HOLDFAST_NATIVE_H

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>

enum { LINE = 64, PAGE = 4096 };

/* The widest registers that are used, in bytes: 16, 32 or 64. */
extern int holdfast_registers;

/* The lines a little ahead of a copy that has reached `from` and `to`, and has `left` bytes to go: `upto` of them.

   Both sides are asked for: a line that is to be overwritten is read first. The processor asks of its own accord,
   but begins anew with each page and each turn from copying to hashing; asked this way two cores copy, compare and
   hash as fast as they otherwise copy. Nothing is asked for beyond the end, and what is asked never faults. */
static inline void fetch_ahead(const char *to, const char *from, uint64_t left, uint64_t upto)
{
    enum { AHEAD = 2 << 10 };
    for (uint64_t at = AHEAD; at < AHEAD + upto && at < left; at += LINE) {
        _mm_prefetch(from + at, _MM_HINT_T0);
        __asm__ volatile("prefetchw %0" : : "m"(to[at]));
    }
}

#endif

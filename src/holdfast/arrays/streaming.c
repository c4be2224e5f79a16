/* A copy that writes past the cache.

   A store into the cache first reads the line that it is about to overwrite. Where a whole state is copied and
   nobody looks at the copy soon, that is a third of the traffic for nothing. The C library avoids it only for
   single copies that are larger than most of the last cache, which on servers means hundreds of MiB; a state
   is thousands of arrays, each far below.

   Four pages are copied side by side, as the C library does it: more of them are on their way at a time. */

#include "native.h"

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SIDE = 4, STRIDE = SIDE * PAGE, AHEAD = 512 };

/* Copy as many strides as `count` has; `to` begins with a line. The same for each width of registers. */
#define STREAM(NAME, TARGET, BYTES, LOAD, STORE)                                                                \
    __attribute__((target(TARGET))) static void NAME(char *restrict to, const char *restrict from, size_t count) \
    {                                                                                                           \
        for (; count >= STRIDE; to += STRIDE, from += STRIDE, count -= STRIDE)                                  \
            for (size_t line = 0; line < PAGE; line += LINE) {                                                  \
                /* Behind the end of a page comes that of the next stride: the one beside it is copied too. */   \
                size_t next = line + AHEAD < PAGE ? AHEAD : AHEAD - PAGE + STRIDE;                              \
                for (size_t at = line; at < STRIDE; at += PAGE) {                                               \
                    _mm_prefetch(from + at + next, _MM_HINT_T0); /* never faults */                             \
                    for (size_t word = at; word < at + LINE; word += BYTES)                                     \
                        STORE((void *)(to + word), LOAD((const void *)(from + word)));                          \
                }                                                                                               \
            }                                                                                                   \
    }

STREAM(stream_512, "avx512f", 64, _mm512_loadu_si512, _mm512_stream_si512)
STREAM(stream_256, "avx", 32, _mm256_loadu_si256, _mm256_stream_si256)
STREAM(stream_128, "sse2", 16, _mm_loadu_si128, _mm_stream_si128)

/* Copy `count` bytes; the two must not overlap. When it returns, all other cores see the bytes. */
void holdfast_stream(char *restrict to, const char *restrict from, size_t count)
{
    size_t head = -(uintptr_t)to & (LINE - 1);
    if (count < head + STRIDE) {
        memcpy(to, from, count);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, count -= head;
    (holdfast_registers == 64 ? stream_512 : holdfast_registers == 32 ? stream_256 : stream_128)(to, from, count);
    _mm_sfence();
    size_t done = count - count % STRIDE;
    memcpy(to + done, from + done, count - done);
}

/* What follows does the same to many: `sizes[i]` bytes from the address `from[i]` to `to + at[i]`. */

void holdfast_stream_all(char *to, const uint64_t *at, const uint64_t *from, const uint64_t *sizes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        holdfast_stream(to + at[i], (const char *)(uintptr_t)from[i], sizes[i]);
}

/* Copies that stay in the cache, for who looks at them next. */
void holdfast_copy_all(char *to, const uint64_t *at, const uint64_t *from, const uint64_t *sizes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy(to + at[i], (const char *)(uintptr_t)from[i], sizes[i]);
}

/* Whether both sides have the same bytes. */
int holdfast_same_all(const char *to, const uint64_t *at, const uint64_t *from, const uint64_t *sizes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (memcmp(to + at[i], (const char *)(uintptr_t)from[i], sizes[i]) != 0)
            return 0;
    return 1;
}

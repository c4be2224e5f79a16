/* A stretch of bytes brought to where they belong, and hashed on the way.

   Piece by piece, each small enough to stay in the cache: read, copied, hashed. Without the interpreter, for
   which threads that read would queue up behind the one that makes arrays. */

#define _GNU_SOURCE

#include "hashing.h"
#include "native.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SECTOR = 512, STEP = 128 << 10, HEAD = 4, PER_DIM = 3 };

/* A row of a table: where its bytes begin (an offset of the file), where they go (an address), how many lie
   together, over how many dims they are repeated; then count, source stride and target stride of each dim,
   the outermost first. Dims nest in the source, so that source offsets rise. */

static void copy_dims(
    uint64_t source, char *target, uint64_t run, const uint64_t *dim, uint64_t dims, const char *bytes, uint64_t lo,
    uint64_t hi)
{
    if (!dims) {
        uint64_t first = source > lo ? source : lo, last = source + run < hi ? source + run : hi;
        if (first < last)
            memcpy(target + (first - source), bytes + (first - lo), last - first);
        return;
    }
    uint64_t count = dim[0], from = dim[1], to = dim[2], extent = run;
    for (uint64_t at = 1; at < dims; at++)
        extent += (dim[PER_DIM * at] - 1) * dim[PER_DIM * at + 1];
    uint64_t at = lo >= source + extent ? (lo - source - extent) / from + 1 : 0; /* the first that ends behind lo */
    for (; at < count && source + at * from < hi; at++)
        copy_dims(source + at * from, target + at * to, run, dim + PER_DIM, dims - 1, bytes, lo, hi);
}

/* Copy what a row has of the bytes [lo, hi), which begin at `bytes`; the row behind it. */
static const uint64_t *copy_row(const uint64_t *row, const char *bytes, uint64_t lo, uint64_t hi)
{
    copy_dims(row[0], (char *)(uintptr_t)row[1], row[2], row + HEAD, row[3], bytes, lo, hi);
    return row + HEAD + PER_DIM * row[3];
}

/* Read [offset, offset + size) of a file, as far as it goes; how much that was, or minus the error number. */
static int64_t read_all(int fd, char *into, uint64_t offset, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        ssize_t got = pread(fd, into + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        done += (uint64_t)got;
        /* A direct descriptor ends in a partial sector; asking again from there would be unaligned. */
        if (got == 0 || got % SECTOR)
            break;
    }
    return (int64_t)done;
}

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Scatter the `size` bytes from `offset` on by the `rows` rows of `table`, and hash them if `digest` is given.

   They are read from `fd` into the `room` bytes of `buffer`, a piece at a time; or lie there already, all of
   them, where `fd` is negative. `room` and `offset` are such as the descriptor takes. Returns how many bytes
   there were, fewer than `size` at the end of the file; or minus the error number. `hash_s` is given the
   processor time of hashing. */
int64_t holdfast_scatter(
    int fd, uint64_t offset, uint64_t size, char *buffer, uint64_t room, const uint64_t *table, uint64_t rows,
    uint64_t seed, uint8_t *digest, double *hash_s)
{
    Hash hash;
    uint64_t at = offset, end = offset + size;
    if (digest != NULL)
        hash_begin(&hash, seed);
    while (at < end) {
        uint64_t there = end - at;
        if (fd >= 0) {
            /* Beyond the end of the file, if that is no multiple of what a disk reads. */
            uint64_t asked = (there + PAGE - 1) / PAGE * PAGE;
            int64_t got = read_all(fd, buffer, at, asked < room ? asked : room);
            if (got < 0)
                return got;
            if ((uint64_t)got < there && (uint64_t)got < room)
                return (int64_t)(at - offset) + got;
            there = (uint64_t)got < there ? (uint64_t)got : there;
        }
        for (const char *bytes = buffer; there;) {
            uint64_t step = there < STEP ? there : STEP;
            const uint64_t *row = table;
            for (uint64_t number = 0; number < rows; number++)
                row = copy_row(row, bytes, at, at + step);
            if (digest != NULL) {
                double begun = cpu_s();
                hash_add(&hash, (const uint8_t *)bytes, step);
                *hash_s += cpu_s() - begun;
            }
            bytes += step, at += step, there -= step;
        }
    }
    if (digest != NULL && !hash_end(&hash, digest))
        return -EDOM;
    return (int64_t)size;
}

/* Copy `sizes[i]` bytes from the address `from[i]` to `to + at[i]`, for each i, and hash what the target has then: one
   digest for each group, of which number g ends before `ends[g]`. `same[g]` says whether both sides are, which is
   looked at only if `compared`. Returns 0; minus EDOM if there are too few bytes for a digest. */
int holdfast_copy_hashed(
    char *to, const uint64_t *at, const uint64_t *from, const uint64_t *sizes, const uint64_t *ends, size_t groups,
    int compared, uint8_t *digests, uint8_t *same)
{
    uint64_t i = 0;
    for (size_t group = 0; group < groups; group++) {
        Hash hash;
        hash_begin(&hash, 0);
        same[group] = 1;
        for (; i < ends[group]; i++)
            same[group] &=
                hash_copy(&hash, (uint8_t *)to + at[i], (const uint8_t *)(uintptr_t)from[i], sizes[i], compared);
        if (!hash_end(&hash, digests + group * DIGEST))
            return -EDOM;
    }
    return 0;
}

/* XXH3 of 128 bits (Yann Collet's xxHash, whose specification this follows), fed piece by piece.

   The xxhash package hashes as fast, but only what Python hands to it: a block that is read, copied and hashed
   while it is in the cache would go through the interpreter for every piece. Digests are the same, and tests
   compare them with the package's. Inputs of up to 240 bytes, which xxHash treats in other ways, have none
   here. */

#ifndef HOLDFAST_HASHING_H
#define HOLDFAST_HASHING_H

#include <stddef.h>
#include <stdint.h>

enum { STRIPE = 64, SECRET = 192, SHORTEST = 241, DIGEST = 16 };

typedef struct {
    uint64_t lanes[8];
    uint8_t secret[SECRET];
    uint8_t held[2 * STRIPE]; /* the stripe that went in last, and up to one that has not */
    size_t waiting;           /* bytes of the latter: one goes in when it is known not to be the last */
    unsigned stripes;         /* in this block of sixteen */
    uint64_t total;
} Hash __attribute__((aligned(64)));

void hash_begin(Hash *hash, uint64_t seed);
void hash_add(Hash *hash, const uint8_t *data, size_t size);

/* Copy bytes and add what is at `to` then; the two must not overlap. Whether both sides are the same, which is
   looked at only if `compared`. */
int hash_copy(Hash *hash, uint8_t *to, const uint8_t *from, size_t size, int compared);

/* Whether there is a digest: not of inputs shorter than SHORTEST. */
int hash_end(const Hash *hash, uint8_t digest[DIGEST]);

#endif

/* Bytes that pass through a socket and are hashed on the way, without the interpreter.

   A step is hashed right after the kernel has copied it, when it is in the cache; before that, the hash would pay
   for fetching it. */

#define _GNU_SOURCE

#include "hashing.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { STEP = 256 << 10, VIEWS = 64 };

typedef struct {
    uint64_t view, inside; /* which one, and how far in it */
} Cursor;

/* What passes is `head`, `body` and `tail` bytes, in this order, and lies in the views. The body is hashed, and
   the tail is its digest. */
typedef struct {
    Hash hash;
    const struct iovec *views;
    uint64_t head, body, tail;
    uint64_t passed, hashed;
    Cursor here, there; /* where the next byte is that passes, and that is hashed */
} Passage;

static void skip(const struct iovec *views, Cursor *cursor, uint64_t count)
{
    cursor->inside += count;
    while (cursor->inside && cursor->inside >= views[cursor->view].iov_len)
        cursor->inside -= views[cursor->view++].iov_len;
}

size_t holdfast_passage_bytes(void)
{
    return sizeof(Passage);
}

void holdfast_passage(Passage *one, const struct iovec *views, uint64_t head, uint64_t body, uint64_t tail)
{
    memset(one, 0, sizeof *one);
    hash_begin(&one->hash, 0);
    one->views = views, one->head = head, one->body = body, one->tail = tail;
    one->hashed = head;
    skip(views, &one->there, head);
}

static void hash_upto(Passage *one, uint64_t end)
{
    while (one->hashed < end) {
        const struct iovec *view = one->views + one->there.view;
        uint64_t some = view->iov_len - one->there.inside;
        if (some > end - one->hashed)
            some = end - one->hashed;
        hash_add(&one->hash, (const uint8_t *)view->iov_base + one->there.inside, some);
        skip(one->views, &one->there, some);
        one->hashed += some;
    }
}

/* The next bytes, `limit` at most, as the kernel takes them; how many they are. */
static uint64_t gathered(const Passage *one, uint64_t limit, struct iovec *found, size_t *count)
{
    Cursor at = one->here;
    uint64_t total = 0;
    for (*count = 0; *count < VIEWS && total < limit; ++*count) {
        const struct iovec *view = one->views + at.view;
        uint64_t some = view->iov_len - at.inside;
        if (some > limit - total)
            some = limit - total;
        found[*count] = (struct iovec){(char *)view->iov_base + at.inside, some};
        skip(one->views, &at, some);
        total += some;
    }
    return total;
}

/* Send or receive until all has passed or the socket's time is up; how many bytes passed, or minus the error number:
   ENODATA if the other side has ended the connection. */
int64_t holdfast_pass(Passage *one, int fd, int sending)
{
    uint64_t end = one->head + one->body, total = end + one->tail, before = one->passed;
    while (one->passed < total) {
        uint64_t limit = total - one->passed;
        if (limit > STEP + one->tail)
            limit = STEP;
        else if (sending) { /* the digest goes along with the last of what it is of */
            hash_upto(one, end);
            uint8_t *tail = one->views[one->there.view].iov_base;
            if (one->passed <= end && one->tail && !hash_end(&one->hash, tail))
                return -EDOM;
        }
        struct iovec views[VIEWS];
        size_t count;
        uint64_t asked = gathered(one, limit, views, &count);
        struct msghdr message = {.msg_iov = views, .msg_iovlen = count};
        ssize_t got = sending ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno != EAGAIN)
            return -errno;
        if (got == 0)
            return -ENODATA;
        if (got < 0)
            break;
        skip(one->views, &one->here, (uint64_t)got);
        one->passed += (uint64_t)got;
        hash_upto(one, one->passed < end ? one->passed : end);
        if ((uint64_t)got < asked)
            break;
    }
    return (int64_t)(one->passed - before);
}

/* Whether what came is what its tail says. */
int holdfast_passed(const Passage *one)
{
    uint8_t digest[DIGEST];
    return one->hashed == one->head + one->body && hash_end(&one->hash, digest) &&
           memcmp(digest, one->views[one->there.view].iov_base, DIGEST) == 0;
}

/* Ranges of files to where they belong, by threads that do not come back to the interpreter in between.
 *
 * Room: the inner loop of transfer.py, which alone calls it. Rule: a thread takes the next range when it has
 * launched its last, so that none waits for another; what a range's bytes mean is no business of this file.
 *
 * A range for a GPU is read into one of the thread's two staging buffers, while the copy engine fetches the
 * other; one for host memory is read into where it lies. The driver is reached through the caller's table of
 * functions, because nothing here is linked with it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int64_t file, offset, bytes;
    int64_t target; /* address */
    int64_t device; /* whether that is a GPU's */
} range;

typedef struct {
    const range *_Atomic ranges;
    _Atomic int64_t ready;   /* ranges that are written down */
    _Atomic int64_t taken;   /* by threads; goes beyond `ready` where they wait for more */
    _Atomic int64_t moved;   /* bytes, for progress */
    _Atomic int32_t closed;  /* there will be no more */
    _Atomic int32_t stopped; /* a thread or the caller failed */
} work;

typedef struct { /* of the CUDA driver API, with its signatures; `stream` and `context` are its handles */
    int (*set_context)(void *);
    int (*copy)(uint64_t, const void *, size_t, void *);
    int (*create)(void **, unsigned);
    int (*record)(void *, void *);
    int (*wait)(void *);
    int (*destroy)(void *);
    void *context, *stream;
} driver;

typedef struct { /* of one thread */
    int64_t range;  /* its index, -1 without a failure */
    int32_t error;  /* errno, 0 where the file ended */
    int32_t status; /* of the driver; then the read was well */
} failure;

static int read_all(const range *r, char *to, failure *why) {
    int64_t done = 0;
    while (done < r->bytes) {
        ssize_t n = pread((int)r->file, to + done, (size_t)(r->bytes - done), (off_t)(r->offset + done));
        if (n > 0) {
            done += n;
        } else if (n == 0 || errno != EINTR) {
            why->error = n ? errno : 0;
            return 0;
        }
    }
    return 1;
}

/* Whether range `i` is there; waits for it. */
static int arrived(work *w, int64_t i) {
    const struct timespec nap = {0, 20000};
    for (;;) {
        int closed = atomic_load(&w->closed); /* before `ready`, which does not change after it */
        if (atomic_load(&w->stopped))
            return 0;
        if (i < atomic_load(&w->ready))
            return 1;
        if (closed)
            return 0;
        nanosleep(&nap, NULL);
    }
}

void rimuru_publish(work *w, const range *ranges, int64_t ready, int closed) {
    atomic_store(&w->ranges, ranges); /* which may have moved to where there is more room */
    atomic_store(&w->ready, ready);
    atomic_store(&w->closed, closed);
}

/* Move ranges until there are no more. `buffers` holds two of `size` bytes, `size` at least that of every
 * range for a GPU; without a GPU both may be null. All copies have ended on return. */
void rimuru_move(work *w, const driver *gpu, char *buffers, int64_t size, failure *why) {
    void *drained[2] = {NULL, NULL};
    int pending[2] = {0, 0}, status = 0;
    why->range = -1;
    if (gpu)
        status = gpu->set_context(gpu->context);
    for (int b = 0; gpu && b < 2 && !status; b++)
        status = gpu->create(&drained[b], 2); /* without timing */
    int64_t i = 0;
    for (int turn = 0; !status; turn ^= 1) {
        i = atomic_fetch_add(&w->taken, 1);
        if (!arrived(w, i))
            break;
        const range *r = &atomic_load(&w->ranges)[i];
        char *to = (char *)r->target;
        if (r->device) {
            to = buffers + turn * size;
            if (pending[turn] && (status = gpu->wait(drained[turn])))
                break;
            pending[turn] = 0;
        }
        if (!read_all(r, to, why)) {
            why->range = i;
            break;
        }
        if (r->device) {
            if ((status = gpu->copy((uint64_t)r->target, to, (size_t)r->bytes, gpu->stream)) ||
                (status = gpu->record(drained[turn], gpu->stream)))
                break;
            pending[turn] = 1;
        }
        atomic_fetch_add(&w->moved, r->bytes);
    }
    for (int b = 0; b < 2; b++) {
        if (pending[b]) {
            int s = gpu->wait(drained[b]);
            status = status ? status : s;
        }
        if (drained[b])
            gpu->destroy(drained[b]);
    }
    if (status) {
        why->range = i;
        why->status = status;
    }
    if (why->range >= 0)
        atomic_store(&w->stopped, 1);
}

/* Copies in the host's memory, for copying.py: plain C without Python, called through ctypes.
 *
 * A usual store reads the line that it writes to first, so a copy moves three bytes for every one. A
 * *streamed* copy writes past the processor's caches, and moves two. memmove does that on its own, but
 * only for single memories far larger than a tensor (hundreds of MiB, on the machine it was measured on).
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE 64
#define SHORTEST (4 * LINE) /* of which enough is left between its first and last line to be worth it */

static void stream(char *to, const char *from, size_t size)
{
    size_t head = -(uintptr_t)to & (LINE - 1), body;

    if (size < SHORTEST) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    body = size - size % LINE;
    for (size_t at = 0; at < body; at += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    memcpy(to + body, from + body, size - body);
}

static void finish(void)
{
    _mm_sfence(); /* streamed stores are not ordered with what says "done" after them */
}

const int rayxfer_streams = 1;
#else
static void stream(char *to, const char *from, size_t size)
{
    memcpy(to, from, size);
}

static void finish(void)
{
}

const int rayxfer_streams = 0;
#endif

/* One memory, which does not overlap the other. */
void rayxfer_stream(char *to, const char *from, size_t size)
{
    stream(to, from, size);
    finish();
}

/* Many, by address. */
void rayxfer_copy_many(const uint64_t *to, const uint64_t *from, const uint64_t *sizes, size_t count,
                       int streamed)
{
    for (size_t i = 0; i < count; i++) {
        if (streamed)
            stream((char *)(uintptr_t)to[i], (const char *)(uintptr_t)from[i], sizes[i]);
        else
            memcpy((char *)(uintptr_t)to[i], (const char *)(uintptr_t)from[i], sizes[i]);
    }
    if (streamed)
        finish();
}

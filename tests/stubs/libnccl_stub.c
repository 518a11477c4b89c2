/* Stands in for libnccl.so.2: shows that arguments arrive as they should. One member, no device. */
#include <stddef.h>
#include <string.h>

typedef struct { char internal[128]; } id_t_;
typedef struct { size_t size; unsigned magic, version; int blocking; } config_t;

static int left, aborts, broken;
static size_t sent;
static struct { int ranks, rank; } comm;

int ncclGetVersion(int *version) { *version = 22703; return 0; }
const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "invalid"; }
int ncclGetUniqueId(id_t_ *id) {
    for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2 + 1);
    return 0;
}
int ncclCommInitRankConfig(void **out, int ranks, id_t_ id, int rank, config_t *config) {
    if (config->size != 24 || config->magic != 0xcafebeef || config->version != 21400) return 4;
    if (config->blocking != 0 || rank < 0 || rank >= ranks) return 4;
    for (int i = 0; i < 128; i++)
        if (id.internal[i] != (char)(i * 2 + 1)) return 4;
    comm.ranks = ranks;
    comm.rank = rank;
    left = ranks == 1 ? 3 : -1;
    *out = &comm;
    return 7;
}
int ncclCommGetAsyncError(void *c, int *state) {
    if (c != &comm) return 4;
    if (broken) *state = 6;
    else if (left != 0) { *state = 7; if (left > 0) left--; }
    else *state = 0;
    return 0;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *c, void *stream) {
    if (c != &comm || from != to || type != 1 || root != 0 || stream != (void *)0x5eULL) return 4;
    sent += count;
    left = 2;
    return 7;
}
int ncclCommAbort(void *c) { if (c != &comm) return 4; aborts++; return 0; }
size_t stub_sent(void) { return sent; }
int stub_aborts(void) { return aborts; }
void stub_break(int value) { broken = value; }

/* Frames on stdin and stdout. Part of launcher.c, which describes them. */

static void read_all(void *to, size_t n) {
    for (char *p = to; n;) {
        ssize_t got = read(0, p, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(0);
        p += got, n -= got;
    }
}

static void write_all(const void *from, size_t n) {
    for (const char *p = from; n;) {
        ssize_t put = write(1, p, n);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) _exit(0);
        p += put, n -= put;
    }
}

#define KEPT_ANSWER (1u << 20)

static char *answer;
static size_t answer_size, answer_room;

/* Room for n more bytes. */
static void reserve(size_t n) {
    if (answer_size + n <= answer_room) return;
    answer_room = answer_size + n;
    answer = realloc(answer, answer_room);
    if (!answer) _exit(4);
}

static void put(const void *from, size_t n) {
    if (answer_size + n > answer_room) reserve(n + answer_size + 4096);
    memcpy(answer + answer_size, from, n);
    answer_size += n;
}

static void start_answer(int32_t status) {
    answer_size = 0;
    uint32_t placeholder = 0;
    put(&placeholder, 4);
    put(&status, 4);
}

static void send_answer(void) {
    uint32_t n = answer_size - 4;
    memcpy(answer, &n, 4);
    write_all(answer, answer_size);
    if (answer_room <= 4 * KEPT_ANSWER) return;
    free(answer);
    answer = NULL, answer_room = 0;
}


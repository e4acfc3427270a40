/* The workspace: read, write, list, dump. Runs inside the pod; no path leaves /work. Part of launcher.c. */

#define PIECE (256u << 10) /* bytes of a file in one record of a dump */
#define PART (1u << 20)    /* a dump is sent in frames of about this size, so that the agent stays small */

static int open_beneath(const char *path, int flags, int mode) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    return syscall(SYS_openat2, work_fd, path, &how, sizeof how);
}

static int is_outside(const char *path) {
    return errno == EXDEV || errno == ELOOP || path[0] == '/' || path[0] == 0;
}

/* Open below a folder also where the mode forbids it: everything in /work is the agent's own. */
static int open_own(int dir, const char *name, int flags, mode_t mode) {
    int fd = openat(dir, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 || errno != EACCES || fchmodat(dir, name, 0700, 0)) return fd;
    fd = openat(dir, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0) fchmod(fd, mode & 07777);
    return fd;
}

static void do_read(const char *path) {
    int fd = open_beneath(path, O_RDONLY | O_NONBLOCK, 0);
    struct stat info;
    int status = 0;
    if (fd < 0) status = is_outside(path) ? -2 : errno == EACCES ? -100 - EACCES : -1;
    else if (fstat(fd, &info) || !S_ISREG(info.st_mode)) status = -1;
    else if (info.st_size > MAX_FRAME - 64) status = -100 - EFBIG;
    start_answer(status);
    if (!status) {
        reserve(info.st_size); /* no doubling: the pod's memory limit holds for the agent too */
        char block[65536];
        for (ssize_t n; answer_size < MAX_FRAME - sizeof block && (n = read(fd, block, sizeof block)) > 0;) put(block, n);
    }
    if (fd >= 0) close(fd);
}

/* Make the folders of `path`, links in the workspace allowed; 0 or a status. */
static int make_parents(char *path) {
    for (char *slash = path; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        int fd = open_beneath(path, O_PATH | O_DIRECTORY, 0);
        if (fd < 0 && errno == ENOENT) {
            char *base = strrchr(path, '/');
            int parent = work_fd;
            if (base) {
                *base = 0;
                parent = open_beneath(path, O_PATH | O_DIRECTORY, 0);
                *base = '/';
            }
            if (parent >= 0) mkdirat(parent, base ? base + 1 : path, 0755); /* a failure shows in the next line */
            if (base && parent >= 0) close(parent);
            fd = open_beneath(path, O_PATH | O_DIRECTORY, 0);
        }
        int error = errno;
        *slash = '/';
        errno = error;
        if (fd < 0) return is_outside(path) ? -2 : -100 - errno;
        close(fd);
    }
    return 0;
}

/* A symbolic link, as it was dumped. It may point anywhere: whoever follows it is inside the pod. */
static int write_link(char *path, const char *target, uint32_t size) {
    char text[4096], *base = strrchr(path, '/');
    if (size >= sizeof text) return -2;
    memcpy(text, target, size);
    text[size] = 0;
    int parent = work_fd;
    if (base) {
        *base = 0;
        parent = open_beneath(path, O_PATH | O_DIRECTORY, 0);
        *base = '/';
        if (parent < 0) return is_outside(path) ? -2 : -100 - errno;
    }
    int status = symlinkat(text, parent, base ? base + 1 : path) ? -100 - errno : 0;
    if (base) close(parent);
    return status;
}

static int write_record(char kind, char *path, const char *content, uint32_t size) {
    if (path[0] == '/' || path[0] == 0) return -2;
    int status = make_parents(path);
    if (status || kind == 'd') return status; /* the path of a folder ends with a slash: that was its parent */
    if (kind == 'l') return write_link(path, content, size);
    int flags = O_WRONLY | O_NOFOLLOW | O_NONBLOCK | (kind == 'a' ? O_APPEND : O_CREAT | O_TRUNC);
    int fd = open_beneath(path, flags, kind == 'a' ? 0 : kind == 'x' ? 0755 : 0644); /* a mode needs O_CREAT */
    if (fd < 0) return is_outside(path) ? -2 : -100 - errno;
    while (size && !status) {
        ssize_t n = write(fd, content, size);
        if (n <= 0) status = -100 - (n ? errno : ENOSPC);
        else content += n, size -= n;
    }
    close(fd);
    return status;
}

static void do_write(char *body, size_t size) {
    int status = 0;
    char *p = body, *end = body + size;
    while (!status && p < end) {
        uint32_t n;
        char path[4096], kind = *p++;
        if (end - p < 4) { status = -2; break; }
        memcpy(&n, p, 4);
        p += 4;
        if (n >= sizeof path || end - p < (ptrdiff_t)n + 4) { status = -2; break; }
        memcpy(path, p, n);
        path[n] = 0;
        p += n;
        size_t length = n;
        memcpy(&n, p, 4);
        p += 4;
        if ((ptrdiff_t)n > end - p || strlen(path) != length) { status = -2; break; }
        status = write_record(kind, path, p, n);
        p += n;
    }
    start_answer(status);
}

/* ------------------------------------------------------------------------------------------- list and dump */

static void put_record(char kind, const char *path, size_t length, const void *content, size_t size) {
    uint32_t n = length;
    put(&kind, 1);
    put(&n, 4);
    put(path, length);
    n = size;
    put(&n, 4);
    put(content, size);
    if (answer_size < PART) return;
    send_answer();
    start_answer(0);
}

static void dump_file(int dir, const char *name, const struct stat *info, const char *path, size_t length) {
    int fd = open_own(dir, name, O_RDONLY | O_NONBLOCK, info->st_mode);
    static char piece[PIECE];
    char kind = info->st_mode & 0111 ? 'x' : 'f';
    if (fd < 0) return;
    for (;; kind = 'a') {
        ssize_t n = read(fd, piece, sizeof piece);
        if (n > 0 || kind != 'a') put_record(kind, path, length, piece, n > 0 ? n : 0);
        if (n <= 0) break;
    }
    close(fd);
}

/* Depth is bounded by the length of a path and by the agent's open files. */
static void walk(int dir_fd, char *path, size_t at, int dump) {
    DIR *dir = fdopendir(dir_fd);
    if (!dir) { close(dir_fd); return; }
    for (struct dirent *entry; (entry = readdir(dir));) {
        size_t n = strlen(entry->d_name);
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || at + n + 2 > 4096) continue;
        if (fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
        memcpy(path + at, entry->d_name, n + 1);
        if (S_ISDIR(info.st_mode)) {
            int fd = open_own(dirfd(dir), entry->d_name, O_RDONLY | O_DIRECTORY, info.st_mode | 0700);
            if (fd < 0) continue;
            path[at + n] = '/';
            if (dump) put_record('d', path, at + n + 1, "", 0);
            walk(fd, path, at + n + 1, dump);
        } else if (S_ISREG(info.st_mode)) {
            if (dump) dump_file(dirfd(dir), entry->d_name, &info, path, at + n);
            else if (answer_size < MAX_FRAME - 8192) put(path, at + n + 1);
        } else if (S_ISLNK(info.st_mode) && dump) {
            char target[4096];
            ssize_t size = readlinkat(dirfd(dir), entry->d_name, target, sizeof target);
            if (size > 0) put_record('l', path, at + n, target, size);
        }
    }
    closedir(dir);
}

static void do_walk(int dump) {
    char path[4200];
    start_answer(0);
    int fd = openat(work_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) walk(fd, path, 0, dump);
    if (dump && answer_size > 8) { /* an empty frame ends a dump */
        send_answer();
        start_answer(0);
    }
}

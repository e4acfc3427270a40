/* One pod: namespaces, a read-only system, a small workspace, and an agent (pid 1) that runs commands and moves files.
 *
 *   launcher UID MEMORY_MB PROCESSES DISK_MB CPU_SECONDS [READ_ONLY_BIND ...]      (frames on stdin and stdout)
 *
 * Outer process -> child in new mount, pid, net, ipc, uts (and, without root, user) namespaces -> pivot_root into a tmpfs
 * with the host's /usr bound read-only -> drop all capabilities, seccomp -> serve frames until end of file.
 *
 * Frame: u32 length, payload. Requests: op byte, body. Answers: i32 status, body.
 *   E  f64 timeout, u32 cap, command      -> exit code, u8 truncated, u8 timed out, f64 seconds, output
 *   R  path                               -> 0 and content | -1 none | -2 outside the workspace
 *   W  (u32 n, path, u32 n, content)*     -> 0 | -2 outside | -errno - 100
 *   L                                     -> 0, paths each ended by NUL
 *   D                                     -> 0, (u32 n, path, u32 n, content)* of all regular files
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/capability.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_FRAME (64u << 20)

static int uid, memory_mb, processes, disk_mb, cpu_seconds, work_fd;

static void fail(const char *what) {
    fprintf(stderr, "pod: %s: %s\n", what, strerror(errno));
    _exit(3);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* ------------------------------------------------------------------------------------------------- the root */

static void write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(path);
    close(fd);
}

static void bind_read_only(const char *from, const char *to) {
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL)) fail(from);
    if (mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) && errno != EPERM) fail(to);
}

static void mkdirs(char *path) {
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
    mkdir(path, 0755);
}

/* /bin, /lib, ...: symlinks into /usr on merged systems, bound otherwise */
static void system_dir(const char *name) {
    char host[64], target[256];
    snprintf(host, sizeof host, "/%s", name);
    ssize_t n = readlink(host, target, sizeof target - 1);
    if (n > 0) {
        target[n] = 0;
        if (symlink(target, name)) fail(name);
    } else if (access(host, F_OK) == 0) {
        mkdir(name, 0755);
        bind_read_only(host, name);
    }
}

static void device(const char *name) {
    char host[64], inside[64];
    snprintf(host, sizeof host, "/dev/%s", name);
    snprintf(inside, sizeof inside, "dev/%s", name);
    int fd = open(inside, O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) fail(inside);
    close(fd);
    if (mount(host, inside, NULL, MS_BIND, NULL)) fail(host);
}

static void small_tmpfs(const char *path, int megabytes) {
    char options[128];
    snprintf(options, sizeof options, "size=%dm,nr_inodes=%d,mode=1777", megabytes, 1000 + megabytes * 64);
    mkdir(path, 0755);
    if (mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)) fail(path);
}

static void build_root(int num_binds, char **binds) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=200,mode=755")) fail("tmpfs");
    if (chdir("/tmp")) fail("chdir");
    mkdir("usr", 0755);
    bind_read_only("/usr", "usr");
    const char *dirs[] = {"bin", "sbin", "lib", "lib32", "lib64", "libx32"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) system_dir(dirs[i]);
    mkdir("etc", 0755);
    char text[128];
    snprintf(text, sizeof text, "root:x:0:0::/:/bin/sh\nuser:x:%d:%d::/work:/bin/sh\n", uid, uid);
    write_text("etc/passwd", text);
    snprintf(text, sizeof text, "root:x:0:\nuser:x:%d:\n", uid);
    write_text("etc/group", text);
    write_text("etc/hostname", "pod\n");
    const char *shared[] = {"etc/ld.so.cache", "etc/alternatives", "etc/ld.so.conf.d"};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        char host[64];
        struct stat info;
        snprintf(host, sizeof host, "/%s", shared[i]);
        if (stat(host, &info)) continue;
        if (S_ISDIR(info.st_mode)) mkdir(shared[i], 0755);
        else write_text(shared[i], "");
        bind_read_only(host, shared[i]);
    }
    for (int i = 0; i < num_binds; i++) {
        char inside[512];
        snprintf(inside, sizeof inside, "/tmp%s", binds[i]);
        mkdirs(inside);
        bind_read_only(binds[i], inside);
    }
    mkdir("dev", 0755);
    const char *devices[] = {"null", "zero", "full", "random", "urandom"};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) device(devices[i]);
    if (symlink("/proc/self/fd", "dev/fd")) fail("dev/fd");
    mkdir("proc", 0755);
    if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible") &&
        mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) fail("proc");
    small_tmpfs("work", disk_mb);
    small_tmpfs("tmp", disk_mb);
    mkdir("old", 0755);
    if (syscall(SYS_pivot_root, ".", "old")) fail("pivot_root");
    if (chdir("/") || umount2("/old", MNT_DETACH)) fail("leave the old root");
    rmdir("/old");
    if (mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL)) fail("read-only root");
}

/* ----------------------------------------------------------------------------------------------- confinement */

#define DENY(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
#define NS_FLAGS (CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#if defined(__x86_64__)
#define THIS_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define THIS_ARCH AUDIT_ARCH_AARCH64
#else
#error "pods need x86-64 or arm64"
#endif

static void confine_syscalls(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
#if defined(__x86_64__)
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), /* the x32 calls */
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
#endif
        DENY(SYS_mount), DENY(SYS_umount2), DENY(SYS_pivot_root), DENY(SYS_chroot), DENY(SYS_ptrace),
        DENY(SYS_process_vm_readv), DENY(SYS_process_vm_writev), DENY(SYS_keyctl), DENY(SYS_add_key),
        DENY(SYS_request_key), DENY(SYS_bpf), DENY(SYS_perf_event_open), DENY(SYS_kexec_load),
        DENY(SYS_kexec_file_load), DENY(SYS_init_module), DENY(SYS_finit_module), DENY(SYS_delete_module),
        DENY(SYS_unshare), DENY(SYS_setns), DENY(SYS_userfaultfd), DENY(SYS_open_by_handle_at),
        DENY(SYS_name_to_handle_at), DENY(SYS_reboot), DENY(SYS_swapon), DENY(SYS_swapoff), DENY(SYS_acct),
        DENY(SYS_settimeofday), DENY(SYS_clock_settime), DENY(SYS_sethostname), DENY(SYS_setdomainname),
        DENY(SYS_io_uring_setup), DENY(SYS_io_uring_enter), DENY(SYS_io_uring_register), DENY(SYS_mknodat),
        DENY(SYS_fsopen), DENY(SYS_fsmount), DENY(SYS_open_tree), DENY(SYS_move_mount), DENY(SYS_syslog),
        DENY(SYS_personality), DENY(SYS_quotactl),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS), /* libc falls back to clone */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 1 /* AF_UNIX */, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NS_FLAGS, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) fail("seccomp");
}

static void drop_privileges(int was_root) {
    for (int cap = 0; cap <= 63; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (was_root && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))) fail("setuid");
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (syscall(SYS_capset, &header, none)) fail("capset");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* commands run under the same uid: keep them out of the agent's memory */
    confine_syscalls();
}

/* --------------------------------------------------------------------------------------------------- frames */

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

static char *answer;
static size_t answer_size, answer_room;

static void put(const void *from, size_t n) {
    if (answer_size + n > answer_room) {
        answer_room = 2 * (answer_size + n) + 4096;
        answer = realloc(answer, answer_room);
        if (!answer) _exit(4);
    }
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
}

/* ---------------------------------------------------------------------------------------------------- files */

static int open_beneath(const char *path, int flags, int mode) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    return syscall(SYS_openat2, work_fd, path, &how, sizeof how);
}

static int is_outside(const char *path) {
    return errno == EXDEV || errno == ELOOP || path[0] == '/' || path[0] == 0;
}

static int slurp(int fd) {
    char block[65536];
    ssize_t n;
    while ((n = read(fd, block, sizeof block)) > 0) {
        put(block, n);
        if (answer_size > MAX_FRAME) return -1;
    }
    return n < 0 ? -1 : 0;
}

static void do_read(const char *path) {
    int fd = open_beneath(path, O_RDONLY | O_NONBLOCK, 0);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) || !S_ISREG(info.st_mode)) {
        int status = fd < 0 && is_outside(path) ? -2 : -1;
        if (fd >= 0) close(fd);
        start_answer(status);
        return;
    }
    start_answer(0);
    if (slurp(fd)) start_answer(-1);
    close(fd);
}

static int write_file(char *path, const char *content, uint32_t size) {
    if (path[0] == '/' || path[0] == 0) return -2;
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
            if (parent >= 0 && mkdirat(parent, base ? base + 1 : path, 0755)) fd = -1;
            if (base && parent >= 0) close(parent);
            fd = open_beneath(path, O_PATH | O_DIRECTORY, 0);
        }
        if (fd < 0) return is_outside(path) ? -2 : -100 - errno;
        close(fd);
        *slash = '/';
    }
    int fd = open_beneath(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd < 0) return is_outside(path) ? -2 : -100 - errno;
    while (size) {
        ssize_t n = write(fd, content, size);
        if (n <= 0) {
            int error = errno;
            close(fd);
            return -100 - error;
        }
        content += n, size -= n;
    }
    close(fd);
    return 0;
}

static void do_write(char *body, size_t size) {
    int status = 0;
    for (char *p = body; !status && p + 8 <= body + size;) {
        uint32_t n;
        memcpy(&n, p, 4);
        char path[4096];
        if (n >= sizeof path || p + 8 + n > body + size) { status = -2; break; }
        memcpy(path, p + 4, n);
        path[n] = 0;
        p += 4 + n;
        memcpy(&n, p, 4);
        if (n > body + size - p - 4) { status = -2; break; }
        status = strlen(path) ? write_file(path, p + 4, n) : -2;
        p += 4 + n;
    }
    start_answer(status);
}

static void walk(int dir_fd, char *prefix, size_t at, int with_content) {
    DIR *dir = fdopendir(dir_fd);
    if (!dir) { close(dir_fd); return; }
    for (struct dirent *entry; (entry = readdir(dir));) {
        size_t n = strlen(entry->d_name);
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || at + n + 2 > 4096) continue;
        memcpy(prefix + at, entry->d_name, n + 1);
        struct stat info;
        if (fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
        if (S_ISDIR(info.st_mode)) {
            int fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (fd < 0) continue;
            prefix[at + n] = '/';
            walk(fd, prefix, at + n + 1, with_content);
        } else if (S_ISREG(info.st_mode) && answer_size < MAX_FRAME) {
            uint32_t length = at + n;
            if (!with_content) { put(prefix, length + 1); continue; }
            int fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
            if (fd < 0) continue;
            put(&length, 4);
            put(prefix, length);
            size_t mark = answer_size;
            put(&length, 4);
            slurp(fd);
            uint32_t size = answer_size - mark - 4;
            memcpy(answer + mark, &size, 4);
            close(fd);
        }
    }
    closedir(dir);
}

static void do_walk(int with_content) {
    char prefix[4200];
    start_answer(0);
    int fd = openat(work_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) walk(fd, prefix, 0, with_content);
}

/* ------------------------------------------------------------------------------------------------- commands */

static void limit(int which, rlim_t value) {
    struct rlimit bound = {value, value}, present;
    if (!getrlimit(which, &present) && present.rlim_max != RLIM_INFINITY && present.rlim_max < value)
        bound.rlim_cur = bound.rlim_max = present.rlim_max;
    setrlimit(which, &bound);
}

static void run_command(const char *command, int out) {
    setsid();
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out, 1);
    dup2(out, 2);
    closefrom(3);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_CPU, cpu_seconds);
    limit(RLIMIT_NOFILE, 256);
    limit(RLIMIT_AS, (rlim_t)memory_mb << 20);
    limit(RLIMIT_FSIZE, (rlim_t)disk_mb << 20);
    if (processes) limit(RLIMIT_NPROC, processes);
    if (chdir("/work")) _exit(126);
    char *arguments[] = {"sh", "-c", (char *)command, NULL};
    char *environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/work", "LANG=C.UTF-8", "TZ=UTC",
                           "PYTHONDONTWRITEBYTECODE=1", "PYTHONHASHSEED=0", getenv("ETUDE_EXTRA_PATH"), NULL};
    execve("/bin/sh", arguments, environment);
    _exit(127);
}

static void kill_all(void) {
    kill(-1, SIGKILL); /* everything in this pid namespace but the agent itself */
    for (int i = 0; i < 1000; i++) {
        pid_t pid = waitpid(-1, NULL, 0);
        if (pid < 0 && errno == ECHILD) return;
        if (pid < 0 && errno != EINTR) return;
        kill(-1, SIGKILL);
    }
}

static void do_exec(char *body, size_t size) {
    double timeout, began = now();
    uint32_t cap;
    if (size < 12) _exit(4);
    memcpy(&timeout, body, 8);
    memcpy(&cap, body + 8, 4);
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC)) { start_answer(126); return; }
    pid_t child = fork();
    if (child == 0) run_command(body + 12, pipes[1]);
    close(pipes[1]);
    start_answer(0);
    uint8_t flags[2] = {0, 0};
    double seconds = 0;
    put(flags, 2);
    put(&seconds, 8);
    size_t first = answer_size;
    int status = 0, done = child < 0, open_end = 1;
    while (!done || open_end) {
        double left = timeout - (now() - began);
        if (left <= 0) { flags[1] = !done; break; }
        struct pollfd wait = {pipes[0], POLLIN, 0};
        int ready = poll(&wait, 1, done ? 0 : open_end ? (left > 0.2 ? 200 : 1 + (int)(left * 1000)) : 1);
        if (ready > 0 && open_end) {
            char block[16384];
            ssize_t n = read(pipes[0], block, sizeof block);
            if (n <= 0) { open_end = 0; if (!done && waitpid(child, &status, 0) == child) done = 1; continue; }
            size_t room = first + cap - answer_size;
            if ((size_t)n > room) { flags[0] = 1; n = room; }
            put(block, n);
        } else if (done) break; /* a left-over daemon holds the pipe */
        if (!done && waitpid(child, &status, WNOHANG) == child) done = 1;
    }
    close(pipes[0]);
    if (!done && child > 0) {
        kill(-child, SIGKILL);
        kill(child, SIGKILL);
    }
    kill_all();
    int32_t code = child < 0 ? 126 : flags[1] ? 124 : WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    seconds = now() - began;
    memcpy(answer + 4, &code, 4);
    memcpy(answer + 8, flags, 2);
    memcpy(answer + 10, &seconds, 8);
}

static void serve(void) {
    for (;;) {
        uint32_t size;
        read_all(&size, 4);
        if (size < 1 || size > MAX_FRAME) _exit(4);
        char *frame = malloc(size + 1);
        if (!frame) _exit(4);
        read_all(frame, size);
        frame[size] = 0;
        switch (frame[0]) {
            case 'E': do_exec(frame + 1, size - 1); break;
            case 'R': do_read(frame + 1); break;
            case 'W': do_write(frame + 1, size - 1); break;
            case 'L': do_walk(0); break;
            case 'D': do_walk(1); break;
            default: _exit(4);
        }
        free(frame);
        send_answer();
    }
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    uid = atoi(argv[1]), memory_mb = atoi(argv[2]), processes = atoi(argv[3]), disk_mb = atoi(argv[4]);
    cpu_seconds = atoi(argv[5]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int was_root = geteuid() == 0, real_uid = getuid(), real_gid = getgid();
    int flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS;
    if (unshare(was_root ? flags : flags | CLONE_NEWUSER)) fail("unshare");
    if (!was_root) {
        char map[64];
        write_text("/proc/self/setgroups", "deny");
        snprintf(map, sizeof map, "0 %d 1", real_uid);
        write_text("/proc/self/uid_map", map);
        snprintf(map, sizeof map, "0 %d 1", real_gid);
        write_text("/proc/self/gid_map", map);
        uid = 0, processes = 0; /* one uid is mapped; RLIMIT_NPROC would count the user's other processes */
    }
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child > 0) {
        close(0), close(1);
        int status;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == 1) _exit(0);
    sethostname("pod", 3);
    build_root(argc - 6, argv + 6);
    if (was_root && chown("/work", uid, uid)) fail("chown");
    drop_privileges(was_root);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* setuid clears it */
    signal(SIGPIPE, SIG_IGN);
    work_fd = open("/work", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (work_fd < 0) fail("work");
    start_answer(0);
    send_answer();
    serve();
}

/* The root of a pod: a small tmpfs with the host's /usr bound read-only, private /proc and /dev, and two limited tmpfs.
 * Part of launcher.c. */

static void write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(path);
    close(fd);
}

/* Mounts below `from` come along and are read-only as well. Before Linux 5.12 only the topmost one can be. */
static void bind_read_only(const char *from, const char *to) {
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL)) fail(from);
    /* struct mount_attr and MOUNT_ATTR_RDONLY | NOSUID | NODEV; which header has them depends on the C library */
    struct { uint64_t set, clear, propagation, userns; } attributes = {.set = 1 | 2 | 4};
    if (!syscall(SYS_mount_setattr, AT_FDCWD, to, AT_RECURSIVE, &attributes, sizeof attributes)) return;
    struct statvfs present; /* in a user namespace, flags the host has set must be set again */
    if (statvfs(to, &present)) fail(to);
    unsigned long keep = (present.f_flag & ST_NOEXEC ? MS_NOEXEC : 0) | (present.f_flag & ST_NOATIME ? MS_NOATIME : 0) |
                         (present.f_flag & ST_RELATIME ? MS_RELATIME : 0) | (present.f_flag & ST_NODIRATIME ? MS_NODIRATIME : 0);
    if (mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | keep, NULL)) fail(to);
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

static void build_etc(void) {
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
}

static void build_root(int num_binds, char **binds) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
    /* built over /proc, not /tmp or another place a bind may come from: nobody keeps an interpreter in /proc */
    if (mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=200,mode=755")) fail("tmpfs");
    if (chdir("/proc")) fail("chdir");
    mkdir("usr", 0755);
    bind_read_only("/usr", "usr");
    const char *dirs[] = {"bin", "sbin", "lib", "lib32", "lib64", "libx32"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) system_dir(dirs[i]);
    build_etc();
    for (int i = 0; i < num_binds; i++) {
        char inside[512];
        snprintf(inside, sizeof inside, "/proc%s", binds[i]);
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

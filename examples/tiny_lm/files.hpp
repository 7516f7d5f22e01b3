// Whole files in and out: read completely or complain, replaced completely or left as they were.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.hpp"

namespace tiny_lm {

/// What the operating system says about its last error: "No such file or directory".
inline std::string system_reason() { return std::generic_category().message(errno); }

/// A file descriptor that closes itself.
class descriptor {
public:
    explicit descriptor(int number = -1) : number_(number) {}
    descriptor(descriptor const&) = delete;
    descriptor& operator=(descriptor const&) = delete;
    ~descriptor() { close(); }
    explicit operator bool() const { return number_ >= 0; }
    int get() const { return number_; }
    void reset(int number) { close(), number_ = number; }
    /// False if the system reports a late write error.
    bool close() { return number_ < 0 || ::close(std::exchange(number_, -1)) == 0; }

private:
    int number_;
};

/// Every byte of a file, or a user_error that names it.
inline std::vector<std::uint8_t> read_file(std::string const& path) try {
    auto const fail = [&] { return user_error("cannot read " + quote(path) + ": " + system_reason()); };
    descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw fail();
    std::vector<std::uint8_t> bytes;
    std::size_t filled = 0;
    for (;;) {
        if (filled == bytes.size()) bytes.resize(filled == 0 ? std::size_t{1} << 16 : 2 * filled);
        ::ssize_t const got = ::read(file.get(), bytes.data() + filled, bytes.size() - filled);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw fail();
        if (got == 0) break;
        filled += static_cast<std::size_t>(got);
    }
    bytes.resize(filled);
    return bytes;
} catch (std::bad_alloc const&) {
    throw user_error("cannot read " + quote(path) + ": it is too large for the memory of this machine");
}

/// Writes every byte, through short writes and interruptions. False, with errno set, if the system refuses.
inline bool write_all(int file, std::span<std::byte const> bytes) {
    while (!bytes.empty()) {
        ::ssize_t const put = ::write(file, bytes.data(), bytes.size());
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return false;
        bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
    return true;
}

/// The file that a path means: links are followed, also to a file that does not exist yet.
inline std::filesystem::path behind_links(std::filesystem::path path) {
    std::error_code failed;
    path = std::filesystem::absolute(path, failed); // of names that do not exist yet, too
    for (int links = 0; links < 40 && std::filesystem::is_symlink(path, failed); ++links)
        path = path.parent_path() / std::filesystem::read_symlink(path, failed); // an absolute target replaces it all
    auto const canonical = std::filesystem::weakly_canonical(path, failed);
    return failed ? path : canonical;
}

/// True if both paths mean one file, be it by a hard link, a symbolic one or another spelling.
inline bool same_file(std::string const& a, std::string const& b) {
    std::error_code ignored;
    return std::filesystem::equivalent(a, b, ignored) || behind_links(a) == behind_links(b);
}

/// The folder in which a file of this path lies.
inline std::string folder_of(std::filesystem::path const& path) {
    auto const folder = path.parent_path();
    return folder.empty() ? "." : folder.string();
}

/// A file that grows beside the one whose place it will take, under a name that no other run has. Where it does not
/// take that place, it is removed with this object, or by remove_unfinished if the program ends without unwinding. One
/// at a time.
class partial_file {
public:
    /// In the folder of `target`, with the mode of the file that is there, or a new file's. False, with errno set, if
    /// the system refuses. Not mkstemp, whose files are for the owner alone: open goes by the umask and the folder.
    bool create(std::string const& target) {
        struct stat old = {};
        bool const replaces = ::stat(target.c_str(), &old) == 0;
        for (int number = 0; number < 1000; ++number) {
            std::string const next =
                folder_of(target) + "/.tiny_lm-" + std::to_string(::getpid()) + "-" + std::to_string(number);
            if (next.size() >= longest) return errno = ENAMETOOLONG, false;
            std::strcpy(name(), next.c_str());
            file_.reset(::open(name(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, replaces ? 0600 : 0666));
            if (file_ || errno != EEXIST) break;
        }
        unfinished() = file_ ? 1 : 0;
        return file_ && (!replaces || ::fchmod(file_.get(), old.st_mode & 0777) == 0);
    }
    partial_file() = default;
    partial_file(partial_file const&) = delete;
    partial_file& operator=(partial_file const&) = delete;
    ~partial_file() { remove_unfinished(); }

    bool write(std::span<std::byte const> bytes) { return write_all(file_.get(), bytes); }
    /// Forces the bytes to the disk, then moves the file over the target in one step.
    bool replace(std::string const& target) {
        if (::fsync(file_.get()) != 0 || !file_.close() || ::rename(name(), target.c_str()) != 0) return false;
        unfinished() = 0;
        return true;
    }

    /// Removes the file that is growing now, if one is. A signal handler may call it.
    static void remove_unfinished() {
        if (unfinished()) ::unlink(name());
        unfinished() = 0;
    }

private:
    static constexpr std::size_t longest = 4096; // as PATH_MAX of Linux
    static char* name() {
        static char text[longest];
        return text;
    }
    static std::sig_atomic_t volatile& unfinished() {
        static std::sig_atomic_t volatile flag = 0;
        return flag;
    }
    descriptor file_;
};

/// Replaces a file by the concatenated pieces, all or nothing: a reader, a full disk or a power cut at any moment
/// finds either the whole old file or the whole new one. A link stays one; what it points to is replaced. write_error
/// if the system refuses, or if what is there is no regular file.
inline void replace_file(std::string const& path, std::span<std::span<std::byte const> const> pieces) {
    auto const require = [&](bool done) {
        if (!done) throw write_error("cannot write " + quote(path) + ": " + system_reason());
    };
    std::string const target = behind_links(path).string();
    struct stat there = {};
    if (::lstat(target.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
        errno = S_ISDIR(there.st_mode) ? EISDIR : EEXIST;
        require(false);
    }
    partial_file file;
    require(file.create(target));
    for (auto const& piece : pieces) require(file.write(piece));
    require(file.replace(target));
    descriptor const folder(::open(folder_of(target).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder) ::fsync(folder.get()); // makes the new name itself durable; some file systems refuse, harmlessly
}

} // namespace tiny_lm

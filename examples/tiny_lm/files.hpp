// Whole files in and out: read completely or complain, replaced completely or left as they were.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "error.hpp"

namespace tiny_lm {

/// What the operating system says about its last error: "No such file or directory".
inline std::string system_reason() { return std::generic_category().message(errno); }

/// A file descriptor that closes itself.
class descriptor {
public:
    explicit descriptor(int number) : number_(number) {}
    descriptor(descriptor const&) = delete;
    descriptor& operator=(descriptor const&) = delete;
    ~descriptor() { close(); }
    explicit operator bool() const { return number_ >= 0; }
    int get() const { return number_; }
    /// False if the system reports a late write error.
    bool close() { return number_ < 0 || ::close(std::exchange(number_, -1)) == 0; }

private:
    int number_;
};

/// Every byte of a file, or a user_error that names it.
inline std::vector<std::uint8_t> read_file(std::string const& path) {
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

/// The folder in which a file of this path lies.
inline std::string folder_of(std::string const& path) {
    auto const folder = std::filesystem::path(path).parent_path();
    return folder.empty() ? "." : folder.string();
}

/// Complains now, rather than after an hour of training, if a file of this path could not be written.
inline void require_writable(std::string const& option, std::string const& path) {
    std::error_code ignored;
    std::string const folder = folder_of(path);
    if (std::filesystem::is_directory(path, ignored))
        throw complaint(option, quote(path) + ", a folder", "a file name");
    if (!std::filesystem::is_directory(folder, ignored))
        throw complaint(option, quote(path), "a file in a folder that exists");
    if (::access(folder.c_str(), W_OK | X_OK) != 0)
        throw complaint(option, quote(path), "a file in a folder that can be written to");
}

/// Replaces a file by the concatenated pieces, all or nothing: a reader, a full disk or a power cut at any moment
/// finds either the whole old file or the whole new one. The pieces go to PATH.partial in the same folder, are forced
/// to the disk, and the name is then moved over in one step.
inline void replace_file(std::string const& path, std::span<std::span<std::byte const> const> pieces) {
    std::string const partial = path + ".partial";
    auto const fail = [&] {
        std::string const reason = system_reason();
        ::unlink(partial.c_str());
        return user_error("cannot write " + quote(path) + ": " + reason);
    };
    descriptor file(::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!file) throw fail();
    for (auto const& piece : pieces)
        if (!write_all(file.get(), piece)) throw fail();
    if (::fsync(file.get()) != 0 || !file.close() || ::rename(partial.c_str(), path.c_str()) != 0) throw fail();
    descriptor const folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder) ::fsync(folder.get()); // makes the new name itself durable; some file systems refuse, harmlessly
}

} // namespace tiny_lm

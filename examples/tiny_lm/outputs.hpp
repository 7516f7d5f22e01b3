// What a run may write to: its own checkpoints, its own logs and new files, nothing else of the user's.
#pragma once

#include <cerrno>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

#include "error.hpp"
#include "files.hpp"
#include "options.hpp"
#include "safetensors.hpp"

namespace tiny_lm {

/// user_error unless the folder is there and a file can be made in it.
inline void require_folder(std::string const& option, std::string const& path) {
    std::string const folder = folder_of(behind_links(path));
    struct stat there = {};
    if (::stat(folder.c_str(), &there) != 0 || !S_ISDIR(there.st_mode))
        throw complaint(option, quote(path), "a file in a folder that exists");
    if (::access(folder.c_str(), W_OK | X_OK) != 0)
        throw complaint(option, quote(path), "a file in a folder that can be written to");
}

/// user_error unless a checkpoint may be saved there: in a new file, or in place of another checkpoint.
inline void require_checkpoint_or_none(std::string const& option, std::string const& path) {
    require_folder(option, path);
    auto const refuse = [&](std::string const& what) {
        throw complaint(option, quote(path) + what, "a new file or a checkpoint of this program");
    };
    struct stat there = {};
    if (::lstat(behind_links(path).c_str(), &there) != 0) {
        if (errno != ENOENT) refuse(": " + system_reason()); // the name is too long, for one
        return;
    }
    if (S_ISDIR(there.st_mode)) refuse(", a folder");
    if (!S_ISREG(there.st_mode)) refuse(", which is no regular file");
    if (!written_here(path)) refuse(", which is neither");
    if (::access(path.c_str(), W_OK) != 0) refuse(", which is protected from writing");
}

/// user_error unless a log may be written there; run_log itself sees that a file that exists is a log. Devices and
/// pipes may take one, a disk may not.
inline void require_log_or_none(std::string const& option, std::string const& path) {
    struct stat there = {};
    if (::stat(path.c_str(), &there) != 0) return require_folder(option, path);
    if (S_ISDIR(there.st_mode) || S_ISBLK(there.st_mode))
        throw complaint(option, quote(path) + (S_ISDIR(there.st_mode) ? ", a folder" : ", a disk"), "a file name");
}

/// user_error, before the run has done anything, if what it will write could destroy what it should not.
inline void check_outputs(options const& run) {
    auto const require_apart = [](char const* output, std::string const& path, char const* other,
                                  std::string const& its) {
        if (!path.empty() && !its.empty() && same_file(path, its))
            throw complaint(output, quote(path) + ", the same file as " + other, "a file of its own");
    };
    for (auto const& text : run.text) {
        require_apart("--save", run.save, "a --text", text);
        require_apart("--log", run.log, "a --text", text);
    }
    require_apart("--log", run.log, "--save", run.save);
    require_apart("--log", run.log, "--resume", run.resume);
    require_checkpoint_or_none("--save", run.save);
    if (!run.log.empty()) require_log_or_none("--log", run.log);
}

} // namespace tiny_lm

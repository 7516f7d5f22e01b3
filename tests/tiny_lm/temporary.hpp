// A folder that lives as long as a test.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace keel_test {

class temporary_folder {
public:
    temporary_folder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "keel_test_XXXXXX").string();
        if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
        folder_ = pattern;
    }
    temporary_folder(temporary_folder const&) = delete;
    temporary_folder& operator=(temporary_folder const&) = delete;
    ~temporary_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    std::string path(std::string const& name = "") const { return (folder_ / name).string(); }
    /// Creates a file and gives its path.
    std::string file(std::string const& name, std::string_view contents) const {
        std::ofstream(path(name), std::ios::binary) << contents;
        return path(name);
    }
    /// Names of what lies in the folder.
    std::vector<std::string> names() const {
        std::vector<std::string> out;
        for (auto const& entry : std::filesystem::directory_iterator(folder_))
            out.push_back(entry.path().filename().string());
        return out;
    }

private:
    std::filesystem::path folder_;
};

inline std::string contents_of(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// What a call complains about; "" if it does not throw an Error.
template <class Error, class Call> std::string complaint_of(Call const& call) {
    try {
        call();
    } catch (Error const& error) {
        return error.what();
    }
    return "";
}

} // namespace keel_test

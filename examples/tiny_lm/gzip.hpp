// What a general-purpose compressor needs for the same text: the line that a language model has to pass.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include <sys/wait.h>

#include "corpus.hpp"
#include "numbers.hpp"

namespace tiny_lm {

/// Bits per byte of the text after `gzip -9`, its 18 bytes of header and trailer included. Nothing if the machine has
/// no gzip program. Unlike the model, gzip starts without having read the training text; it too adapts as it goes.
inline std::optional<double> gzip_bits_per_byte(byte_span text) {
    struct closer {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    std::unique_ptr<std::FILE, closer> const plain(std::tmpfile());
    if (text.empty() || !plain || std::fwrite(text.data(), 1, text.size(), plain.get()) != text.size() ||
        std::fflush(plain.get()) != 0)
        return std::nullopt;
    std::rewind(plain.get());
    std::string const command = "gzip -9 -c < /dev/fd/" + shortest(fileno(plain.get())) + " 2>/dev/null";
    std::FILE* const packed = ::popen(command.c_str(), "r");
    if (!packed) return std::nullopt;
    std::int64_t bytes = 0;
    char buffer[65536];
    for (std::size_t got; (got = std::fread(buffer, 1, sizeof buffer, packed)) > 0;)
        bytes += static_cast<std::int64_t>(got);
    int const status = ::pclose(packed);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || bytes == 0) return std::nullopt;
    return 8.0 * static_cast<double>(bytes) / static_cast<double>(text.size());
}

} // namespace tiny_lm

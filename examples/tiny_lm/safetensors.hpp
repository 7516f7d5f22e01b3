// Named tensors and strings in a safetensors file (https://huggingface.co/docs/safetensors): a 64-bit little-endian
// length, a JSON header of that many bytes, the tensors' bytes end to end.
//
// Any safetensors reader can read what is written here. This one reads only files that were written here, because it
// checks them: the header starts with
//     {"__metadata__":{"digest":"0123456789abcdef",
// where the digest covers the rest of the header, and the metadata hold a digest of every tensor. A file that is
// damaged anywhere, or cut short, is refused before anything of it is used.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <keel/format/bf16.hpp>

#include "digest.hpp"
#include "error.hpp"
#include "files.hpp"
#include "json.hpp"
#include "numbers.hpp"

namespace tiny_lm {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian; this writer does not swap");

using tensor_shape = std::vector<std::int64_t>;
using file_metadata = std::map<std::string, std::string>;

/// An element type: its name in the header and its size.
struct element_type {
    char const* name;
    std::int64_t bytes;
};
inline constexpr element_type element_types[] = {{"I64", 8}, {"F32", 4}, {"BF16", 2}, {"U8", 1}};

/// Which of them a C++ type is.
template <class T> inline constexpr element_type element_of = {nullptr, 0};
template <> inline constexpr element_type element_of<std::int64_t> = element_types[0];
template <> inline constexpr element_type element_of<float> = element_types[1];
template <> inline constexpr element_type element_of<keel::bf16> = element_types[2];
template <> inline constexpr element_type element_of<std::uint8_t> = element_types[3];

inline std::string shape_text(tensor_shape const& shape) {
    std::string out = "[";
    for (auto const extent : shape) {
        if (out.size() > 1) out += ',';
        out += shortest(extent);
    }
    return out + ']';
}

/// Product of the extents; -1 if one is negative or the product does not fit 62 bits.
inline std::int64_t element_count(tensor_shape const& shape) {
    std::int64_t count = 1;
    for (auto const extent : shape) {
        if (extent < 0 || (extent > 0 && count > (std::int64_t{1} << 62) / extent)) return -1;
        count *= extent;
    }
    return count;
}

// --- writing ---------------------------------------------------------------------------------------------------------

/// A tensor to be written: the caller's memory, rows end to end.
struct tensor_source {
    std::string name;
    element_type type;
    tensor_shape shape;
    std::span<std::byte const> bytes;
};

/// The values as a tensor of that name and shape. std::logic_error if they do not fill the shape.
template <class T> tensor_source source_of(std::string name, tensor_shape shape, std::span<T const> values) {
    static_assert(element_of<T>.bytes == sizeof(T), "a type that element_of does not know");
    if (element_count(shape) != static_cast<std::int64_t>(values.size()))
        throw std::logic_error("tensor " + name + ": " + shortest(values.size()) + " values for the shape " +
                               shape_text(shape));
    return {std::move(name), element_of<T>, std::move(shape), std::as_bytes(values)};
}

namespace detail {

inline constexpr std::string_view seal_start = R"({"__metadata__":{"digest":")";
inline constexpr std::size_t seal_end = seal_start.size() + 16; // what the header's digest covers starts here

inline std::string digest_key(std::string_view tensor) { return "digest of " + std::string(tensor); }

inline std::string seal_of(std::string_view header) { return hexadecimal(digest_of(header.substr(seal_end))); }

/// The header's JSON, padded to a multiple of 8 bytes as the format asks for, its own digest filled in.
inline std::string header_of(std::vector<tensor_source> const& tensors, file_metadata const& metadata) {
    std::string header(seal_start);
    header += std::string(16, '0') + '"';
    auto const member = [&](std::string const& name, std::string const& value) {
        header += ',';
        header += json_string(name) + ':' + value;
    };
    for (auto const& [key, text] : metadata) member(key, json_string(text));
    for (auto const& t : tensors) member(digest_key(t.name), json_string(hexadecimal(digest_of(t.bytes))));
    header += '}';
    std::size_t offset = 0;
    for (auto const& t : tensors) {
        std::size_t const end = offset + t.bytes.size();
        member(t.name, std::string(R"({"dtype":")") + t.type.name + R"(","shape":)" + shape_text(t.shape) +
                           R"(,"data_offsets":[)" + shortest(offset) + ',' + shortest(end) + "]}");
        offset = end;
    }
    header += '}';
    header.resize((header.size() + 7) / 8 * 8, ' ');
    return header.replace(seal_start.size(), 16, seal_of(header));
}

} // namespace detail

/// Writes the tensors, widest element type first, so that each is aligned in the file, and the metadata (any
/// strings). The file is replaced as a whole or, with a write_error, not at all. std::logic_error for a name that
/// occurs twice.
inline void write_safetensors(std::string const& path, std::vector<tensor_source> tensors,
                              file_metadata const& metadata) {
    std::ranges::stable_sort(tensors, std::greater{}, [](auto const& t) { return t.type.bytes; });
    std::string const header = detail::header_of(tensors, metadata);
    for (auto const& [key, text] : metadata)
        if (key == "digest") throw std::logic_error("metadata may not be named digest");
    for (auto const& t : tensors)
        if (t.name == "__metadata__" || metadata.contains(detail::digest_key(t.name)) ||
            std::ranges::count(tensors, t.name, &tensor_source::name) > 1)
            throw std::logic_error("tensor name " + t.name + " is taken");
    auto const length = static_cast<std::uint64_t>(header.size());
    std::vector<std::span<std::byte const>> pieces = {std::as_bytes(std::span(&length, 1)),
                                                      std::as_bytes(std::span(header))};
    for (auto const& t : tensors) pieces.push_back(t.bytes);
    replace_file(path, pieces);
}

// --- reading ---------------------------------------------------------------------------------------------------------

/// True if the file begins like those written here, with a header that its own digest seals; its tensors may be damaged.
inline bool written_here(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    std::uint64_t length = 0;
    std::error_code failed;
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    if (!file || length > std::filesystem::file_size(path, failed) || failed) return false;
    std::string header(static_cast<std::size_t>(length), '\0');
    file.read(header.data(), static_cast<std::streamsize>(length));
    return file && header.size() >= detail::seal_end && header.starts_with(detail::seal_start) &&
           header.substr(detail::seal_start.size(), 16) == detail::seal_of(header);
}

/// A safetensors file in memory, verified from its first to its last byte.
class safetensors {
public:
    /// Reads and verifies a file. user_error, one line, if it cannot be read, is damaged in any way or comes from
    /// another program.
    static safetensors read(std::string const& path) { return {path, read_file(path)}; }

    /// The same for a file's bytes; `path` names it in complaints.
    safetensors(std::string path, std::vector<std::uint8_t> bytes) : path_(std::move(path)), bytes_(std::move(bytes)) {
        try {
            parse();
        } catch (json_error const& error) {
            refuse(std::string("its header is no JSON: ") + error.what());
        }
    }

    /// The strings that the writer passed.
    file_metadata const& metadata() const { return metadata_; }
    /// One of them; user_error if there is none of that name.
    std::string const& text(std::string const& key) const {
        auto const found = metadata_.find(key);
        if (found == metadata_.end()) refuse("it has no " + quote(key));
        return found->second;
    }
    /// The tensors' names in alphabetical order.
    std::vector<std::string> names() const {
        std::vector<std::string> out;
        for (auto const& [name, tensor] : tensors_) out.push_back(name);
        return out;
    }

    /// Copies a tensor to the caller's memory; user_error if there is none of that name, element type and shape.
    /// Whoever restores many tensors calls `require` for each first, so that a misfit changes nothing.
    template <class T> void copy(std::string const& name, tensor_shape const& shape, std::span<T> to) const {
        auto const& tensor = require<T>(name, shape);
        if (static_cast<std::int64_t>(to.size()) != element_count(shape))
            throw std::logic_error("tensor " + name + ": no room for the shape " + shape_text(shape));
        if (!to.empty()) std::memcpy(to.data(), bytes_.data() + tensor.begin, to.size_bytes());
    }

    struct entry {
        std::string type;
        tensor_shape shape;
        std::size_t begin, end; ///< bytes of the file
    };
    /// user_error unless there is a tensor of that name, element type and shape.
    template <class T> entry const& require(std::string const& name, tensor_shape const& shape) const {
        auto const found = tensors_.find(name);
        if (found == tensors_.end()) refuse("it has no tensor " + quote(name));
        auto const& tensor = found->second;
        if (tensor.type != element_of<T>.name || tensor.shape != shape)
            refuse("tensor " + quote(name) + " is " + tensor.type + " " + shape_text(tensor.shape) + ", wanted " +
                   element_of<T>.name + " " + shape_text(shape));
        return tensor;
    }

private:
    [[noreturn]] void refuse(std::string const& why) const {
        throw user_error("checkpoint " + quote(path_) + ": " + why);
    }

    void parse() {
        constexpr std::size_t length_bytes = sizeof(std::uint64_t);
        std::uint64_t length = 0;
        if (bytes_.size() < length_bytes) refuse("cut short: " + shortest(bytes_.size()) + " bytes");
        std::memcpy(&length, bytes_.data(), length_bytes);
        if (length > bytes_.size() - length_bytes)
            refuse("damaged, cut short or no safetensors file: a header of " + shortest(length) +
                   " bytes in a file of " + shortest(bytes_.size()));
        std::string_view const header(reinterpret_cast<char const*>(bytes_.data()) + length_bytes, length);
        data_ = length_bytes + length;
        if (header.size() < detail::seal_end || !header.starts_with(detail::seal_start))
            refuse("damaged, or not written by this program");
        if (header.substr(detail::seal_start.size(), 16) != detail::seal_of(header)) refuse("its header is damaged");
        json const root = json_reader::read(header);
        json const& metadata = *root.find("__metadata__");
        for (auto const& [name, description] : *root.as<json::object>())
            if (&description != &metadata) add(name, description);
        require_no_holes();
        take(metadata);
    }

    /// Notes one tensor of the header.
    void add(std::string const& name, json const& description) {
        auto const bad = [&]() { refuse("the description of tensor " + quote(name) + " makes no sense"); };
        auto const whole_numbers = [&](char const* member) {
            std::vector<std::int64_t> out;
            json const* const found = description.find(member);
            auto const* const list = found ? found->as<json::array>() : nullptr;
            if (!list) bad();
            for (auto const& element : *list) {
                auto const* const number = element.as<std::int64_t>();
                if (!number || *number < 0) bad();
                out.push_back(*number);
            }
            return out;
        };
        json const* const member = description.find("dtype");
        auto const* const type_name = member ? member->as<std::string>() : nullptr;
        if (!type_name) bad();
        auto const* const type = std::ranges::find(element_types, *type_name, &element_type::name);
        if (type == std::end(element_types))
            refuse("tensor " + quote(name) + " has the unknown type " + quote(*type_name));
        auto const shape = whole_numbers("shape");
        auto const offsets = whole_numbers("data_offsets");
        auto const room = static_cast<std::int64_t>(bytes_.size() - data_);
        if (offsets.size() != 2 || offsets[0] > offsets[1]) bad();
        if (offsets[1] > room) refuse("cut short: tensor " + quote(name) + " is not all there");
        if (std::int64_t const n = element_count(shape);
            n < 0 || n > room || n * type->bytes != offsets[1] - offsets[0])
            bad();
        auto const place = [&](std::int64_t offset) { return data_ + static_cast<std::size_t>(offset); };
        tensors_[name] = {*type_name, shape, place(offsets[0]), place(offsets[1])};
    }

    /// The tensors must fill the file end to end.
    void require_no_holes() const {
        std::vector<std::pair<std::size_t, std::size_t>> ranges;
        for (auto const& [name, tensor] : tensors_) ranges.emplace_back(tensor.begin, tensor.end);
        std::ranges::sort(ranges);
        std::size_t end = data_;
        for (auto const& [from, to] : ranges) {
            if (from != end) refuse("its tensors overlap or leave a hole");
            end = to;
        }
        if (end != bytes_.size()) refuse(shortest(bytes_.size() - end) + " bytes too long");
    }

    /// Verifies the tensors against the digests in the metadata, and keeps the rest of the metadata.
    void take(json const& metadata) {
        for (auto const& [key, member] : *metadata.as<json::object>()) {
            auto const* const value = member.as<std::string>();
            if (!value) refuse("its metadata " + quote(key) + " is no string");
            if (key != "digest") metadata_[key] = *value;
        }
        for (auto const& [name, tensor] : tensors_) {
            auto const found = metadata_.find(detail::digest_key(name));
            if (found == metadata_.end()) refuse("tensor " + quote(name) + " has no digest");
            auto const contents = std::span(bytes_).subspan(tensor.begin, tensor.end - tensor.begin);
            if (hexadecimal(digest_of(contents)) != found->second) refuse("tensor " + quote(name) + " is damaged");
            metadata_.erase(found);
        }
    }

    std::string path_;
    std::vector<std::uint8_t> bytes_;
    std::size_t data_ = 0; ///< where the tensors' bytes start
    std::map<std::string, entry> tensors_;
    file_metadata metadata_;
};

} // namespace tiny_lm

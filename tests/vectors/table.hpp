// A file of tests/vectors (README.md there): its version, how many rows it says it has, and the rows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/environment.hpp"

namespace keel_test {

/// The version of the vectors that keel's tests were written for.
inline constexpr int vectors_version = 2;

inline std::vector<std::string> cells_of(std::string const& line) {
    std::vector<std::string> cells(1);
    for (char const c : line) {
        if (c == ',')
            cells.emplace_back();
        else
            cells.back() += c;
    }
    return cells;
}

struct vector_table {
    int version = 0;
    std::size_t promised_rows = 0;
    std::string columns;
    std::vector<std::vector<std::string>> rows;
};

/// Reads tests/vectors/<name>.csv; an empty table where there is none, or where it is none of keel's.
inline vector_table read_vectors(std::string const& name) {
    vector_table table;
    std::ifstream file(data_path("vectors/" + name + ".csv"));
    std::string line, word, found_name;
    std::getline(file, line);
    std::istringstream head(line); // # keel conversions version 1 rows 3078
    head >> word >> word >> found_name >> word >> table.version >> word >> table.promised_rows;
    if (found_name != name) return {};
    std::getline(file, table.columns);
    while (std::getline(file, line)) table.rows.push_back(cells_of(line));
    return table;
}

inline uint64_t word_from_hex(std::string const& text) { return std::strtoull(text.c_str(), nullptr, 16); }

/// Words of `digits` hex digits each, from a cell that holds them one after another.
inline std::vector<uint64_t> words_from_hex(std::string const& text, std::size_t digits) {
    std::vector<uint64_t> words;
    for (std::size_t i = 0; i + digits <= text.size(); i += digits)
        words.push_back(word_from_hex(text.substr(i, digits)));
    return words;
}

inline std::string hex(uint64_t word, std::size_t digits) {
    std::string text(digits, '0');
    for (std::size_t i = digits; i-- > 0; word >>= 4) text[i] = "0123456789abcdef"[word & 15];
    return text;
}

} // namespace keel_test

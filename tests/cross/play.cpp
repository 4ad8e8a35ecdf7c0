// Reads calls of the kernels from a file, makes them, and compares their output with the output
// that the file expects. For processors that this machine only emulates. test_aarch64.py writes the
// file.
#include "../../kernels/allocation/native.cpp"
#include "../../kernels/bit_packing/native.cpp"
#include "../../kernels/dirty_bitmap/native.cpp"
#include "../../kernels/erasure/native.cpp"
#include "../../kernels/quantize/native.cpp"
#include "../../kernels/row_digest/native.cpp"
#include "../../kernels/row_gather/native.cpp"
#include "../../kernels/row_set/native.cpp"

#include <cstdio>
#include <string>
#include <vector>

namespace {

using namespace recpoint::baseline;
using Content = std::vector<char>;

struct Call {
    std::string name;
    std::vector<int64_t> numbers;
    std::vector<float> floats;
    std::vector<Content> given;
    std::vector<Content> expected;
};

int64_t read_number(FILE* file) {
    int64_t number = 0;
    if (fread(&number, sizeof number, 1, file) != 1) number = -1;
    return number;
}

Content read_bytes(FILE* file) {
    Content bytes(read_number(file));
    if (!bytes.empty() && fread(bytes.data(), bytes.size(), 1, file) != 1) exit(2);
    return bytes;
}

std::vector<Content> read_list(FILE* file) {
    std::vector<Content> list(read_number(file));
    for (Content& bytes : list) bytes = read_bytes(file);
    return list;
}

template <typename T>
T* at(Content& bytes) {
    return reinterpret_cast<T*>(bytes.data());
}

// Makes the call. Returns what it writes, in the order of `expected`.
std::vector<Content> play(Call& call) {
    std::vector<Content> out;
    for (const Content& bytes : call.expected) out.emplace_back(bytes.size(), char{77});
    const std::vector<int64_t>& n = call.numbers;
    if (call.name == "quantize") {
        const Given given = {
            at<float>(call.given[0]), n[1], n[2], n[3], n[4], n[5], at<uint8_t>(out[0]),
            at<float>(out[1]), at<float>(out[2]), at<uint8_t>(out[3]), at<uint8_t>(out[4]),
        };
        if (n.size() == 6) {
            quantize_plain(&given, n[0], 2);
        } else {
            const std::vector<float>& f = call.floats;
            quantize_by_search(
                &given, n[0], at<float>(call.given[1]), n[6], f[0], n[7], f[1], n[8], n[9], f[2],
                f[3], 2
            );
        }
    } else if (call.name == "allocate") {
        allocate(
            at<float>(call.given[0]), at<float>(call.given[1]), n[1], at<Prices>(call.given[2]),
            at<uint8_t>(out[0]), n[0], 2
        );
    } else if (call.name == "dequantize") {
        dequantize(
            at<uint8_t>(call.given[0]), at<float>(call.given[1]), at<float>(call.given[2]),
            at<float>(out[0]), n[1], n[2], nullptr, nullptr, n[0], 2
        );
    } else if (call.name == "pack") {
        pack(at<uint8_t>(call.given[0]), at<uint8_t>(out[0]), n[1], n[2], n[0], 2);
        unpack(at<uint8_t>(out[0]), at<uint8_t>(out[1]), n[1], n[2], n[0], 2);
    } else if (call.name == "digest") {
        *at<uint64_t>(out[0]) =
            digest_rows(call.given[0].data(), at<int64_t>(call.given[1]), 0, n[1], n[0]);
    } else if (call.name == "mark") {
        memset(out[0].data(), 0, out[0].size());
        auto* words = at<uint32_t>(out[0]);
        const int64_t word_count = static_cast<int64_t>(out[0].size()) / 4;
        mark(words, at<int64_t>(call.given[0]), n[0], 1, n[1]);
        std::vector<int64_t> parts(parts_of(word_count));
        count(words, word_count, parts.data(), 2);
        collect(words, word_count, parts.data(), at<int64_t>(out[1]), 2);
    } else if (call.name == "gather") {
        move_rows<recpoint::run_in_pool>(call.given[0].data(), at<int64_t>(call.given[1]), out[0].data(), nullptr, n[1], n[0], 2);
    } else if (call.name == "parity") {
        std::vector<const char*> members;
        for (Content& bytes : call.given) members.push_back(bytes.data());
        members.pop_back();  // the coefficients
        const auto count = static_cast<int64_t>(members.size());
        encode_members(members.data(), count, out[0].data(), out[1].data(), n[0], 2);
        combine_members(
            members.data(), at<uint8_t>(call.given.back()), count, out[2].data(), n[0], 2
        );
    } else if (call.name == "apply") {
        memcpy(out[0].data(), call.given[0].data(), out[0].size());
        apply_differences(
            out[0].data(), at<int64_t>(call.given[1]), call.given[2].data(),
            at<int64_t>(call.given[3]), n[1], n[0], 2
        );
    } else if (call.name == "symbols") {
        memset(out[1].data(), 255, out[1].size());
        write_symbols(at<int64_t>(call.given[0]), n[0], n[1], at<uint8_t>(out[0]), at<uint8_t>(out[1]));
    } else {
        exit(3);
    }
    return out;
}

}  // namespace

int main(int, char** arguments) {
    FILE* file = fopen(arguments[1], "rb");
    if (file == nullptr) return 2;
    int played = 0;
    int wrong = 0;
    for (int64_t length; (length = read_number(file)) >= 0; ++played) {
        Call call;
        call.name.resize(length);
        if (fread(call.name.data(), length, 1, file) != 1) return 2;
        call.numbers.resize(read_number(file));
        for (int64_t& number : call.numbers) number = read_number(file);
        Content floats = read_bytes(file);
        call.floats.assign(at<float>(floats), at<float>(floats) + floats.size() / 4);
        call.given = read_list(file);
        call.expected = read_list(file);
        if (play(call) != call.expected) {
            ++wrong;
            printf("%s differs in call %d\n", call.name.c_str(), played);
        }
    }
    printf("%d calls, %d wrong\n", played, wrong);
    return wrong == 0 && played > 0 ? 0 : 1;
}

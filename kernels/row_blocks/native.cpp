#include <cerrno>

#include "../native/operation.h"

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace recpoint::RECPOINT_SET {
namespace {

// How records lie in blocks, in the layout of Python's array: each field is an int64. See layout.py.
struct Form {
    int64_t record_bytes;
    int64_t slot_bytes;
    int64_t slots;  // of a block
    int64_t block_bytes;
};

// The start of a slot.
struct Header {
    uint32_t sum;
    uint32_t table;
    int64_t id;
};

static_assert(sizeof(Form) == 32 && sizeof(Header) == 16);

// The states of rows, as Python has them. A negative state is an error of the system.
constexpr int64_t FOUND = 0;
constexpr int64_t ABSENT = 1;
constexpr int64_t CUT_OFF = 2;
constexpr int64_t DAMAGED = 3;
constexpr int64_t MISPLACED = 4;
constexpr int64_t NOT_READ = 5;

// --- CRC32C ------------------------------------------------------------------------------------

#if defined(__SSE4_2__) && defined(__x86_64__)

uint32_t sum_word(uint32_t sum, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(sum, word));
}
uint32_t sum_byte(uint32_t sum, uint8_t byte) { return _mm_crc32_u8(sum, byte); }

#elif defined(__ARM_FEATURE_CRC32)

uint32_t sum_word(uint32_t sum, uint64_t word) { return __crc32cd(sum, word); }
uint32_t sum_byte(uint32_t sum, uint8_t byte) { return __crc32cb(sum, byte); }

#else

// sums[k][b]: the sum of byte b and k zeros behind it.
struct Sums {
    uint32_t of[8][256];
    constexpr Sums() : of() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t sum = byte;
            for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0x82F63B78u : 0);
            of[0][byte] = sum;
        }
        for (int k = 1; k < 8; ++k) {
            for (uint32_t byte = 0; byte < 256; ++byte) {
                of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
            }
        }
    }
};

constexpr Sums SUMS;

uint32_t sum_word(uint32_t sum, uint64_t word) {
    word ^= sum;
    uint32_t found = 0;
    for (int k = 0; k < 8; ++k) found ^= SUMS.of[7 - k][word >> 8 * k & 255];
    return found;
}
uint32_t sum_byte(uint32_t sum, uint8_t byte) { return sum >> 8 ^ SUMS.of[0][(sum ^ byte) & 255]; }

#endif

// The CRC32C of the table, the id and the record of a slot.
uint32_t sum_slot(const char* slot, const Form& form) {
    uint32_t sum = ~0u;
    const int64_t end = static_cast<int64_t>(sizeof(Header)) + form.record_bytes;
    int64_t at = sizeof(uint32_t);
    for (; at < 8; ++at) sum = sum_byte(sum, load<uint8_t>(slot + at));
    for (; at + 8 <= end; at += 8) sum = sum_word(sum, load<uint64_t>(slot + at));
    for (; at < end; ++at) sum = sum_byte(sum, load<uint8_t>(slot + at));
    return ~sum;
}

// --- slots -------------------------------------------------------------------------------------

int64_t place_of(int64_t slot, const Form& form) {
    return slot / form.slots * form.block_bytes + slot % form.slots * form.slot_bytes;
}

// Writes the records of n rows to slots first, first + 1, … of `memory`, which begins with a block.
void fill_slots_of_blocks(
    const char* records, const int64_t* ids, int64_t n, int64_t table, const Form* form,
    char* memory, int64_t first
) {
    for (int64_t i = 0; i < n; ++i) {
        char* slot = memory + place_of(first + i, *form);
        store(slot, Header{0, static_cast<uint32_t>(table), ids[i]});
        char* record = slot + sizeof(Header);
        memcpy(record, records + i * form->record_bytes, form->record_bytes);
        const int64_t used = sizeof(Header) + form->record_bytes;
        memset(slot + used, 0, form->slot_bytes - used);
        store(slot, sum_slot(slot, *form));
    }
}

bool is_zero(const char* memory, int64_t bytes) {
    for (int64_t at = 0; at < bytes; ++at) {
        if (memory[at] != 0) return false;
    }
    return true;
}

int64_t state_of(const char* slot, int64_t table, int64_t id, const Form& form) {
    const auto header = load<Header>(slot);
    if (header.table == 0 && is_zero(slot, form.slot_bytes)) return ABSENT;
    if (sum_slot(slot, form) != header.sum) return DAMAGED;
    const bool is_right = header.table == static_cast<uint32_t>(table) && header.id == id;
    return is_right ? FOUND : MISPLACED;
}

// What is copied of a slot: the record, or everything.
struct Cut {
    int64_t from;
    int64_t bytes;
    Cut(const Form& form, bool whole)
        : from(whole ? 0 : sizeof(Header)),
          bytes(whole ? form.slot_bytes : form.record_bytes) {}
};

// Copies row i from slots[i] of `memory` to out[positions[i]].
void take_slots(
    const char* memory, const int64_t* slots, int64_t n, const Form* form, bool whole, char* out,
    const int64_t* positions
) {
    const Cut cut(*form, whole);
    for (int64_t i = 0; i < n; ++i) {
        const char* slot = memory + place_of(slots[i], *form);
        memcpy(out + positions[i] * cut.bytes, slot + cut.from, cut.bytes);
    }
}

// --- reads and writes at a depth ---------------------------------------------------------------

#if defined(__linux__)
using Request = iocb;
using Answer = io_event;
using Context = aio_context_t;
int64_t setup(int64_t n, Context* context) { return syscall(SYS_io_setup, n, context); }
void destroy(Context context) { syscall(SYS_io_destroy, context); }
int64_t submit(Context context, int64_t n, Request** requests) {
    return syscall(SYS_io_submit, context, n, requests);
}
int64_t answers(Context context, int64_t fewest, int64_t most, Answer* into) {
    return syscall(SYS_io_getevents, context, fewest, most, into, nullptr);
}
#else
struct Request {
    uint64_t aio_data;
    uint16_t aio_lio_opcode;
    uint32_t aio_fildes;
    uint64_t aio_buf;
    uint64_t aio_nbytes;
    int64_t aio_offset;
};
struct Answer {
    uint64_t data;
    int64_t res;
};
using Context = uint64_t;
enum { IOCB_CMD_PREAD, IOCB_CMD_PWRITE };
int64_t setup(int64_t, Context*) { return -1; }
void destroy(Context) {}
int64_t submit(Context, int64_t, Request**) { return -1; }
int64_t answers(Context, int64_t, int64_t, Answer*) { return -1; }
#endif

// A stretch of a file, which is read, and perhaps written after that.
struct Lane {
    Request request;
    int64_t first;  // the rows of the stretch
    int64_t end;
    char* memory;
};

constexpr int64_t LANE_BYTES = 1 << 15;
// Blocks that nobody wants are read if they are no more than this: one read is cheaper than two.
constexpr int64_t GAP_BYTES = 1 << 13;
constexpr int64_t PAGE = 4096;

struct Channel {
    Context context = 0;
    bool has_context = false;
    int64_t lane_count = 0;
    int64_t memory_bytes = 0;
    char* memory = nullptr;
    Lane* lanes = nullptr;
    Lane** idle = nullptr;
    Request** batch = nullptr;
    Answer* answers = nullptr;
};

void free_channel(Channel* channel) {
    if (channel->has_context) destroy(channel->context);
    free(channel->memory);
    free(channel->lanes);
    free(channel->idle);
    free(channel->batch);
    free(channel->answers);
    free(channel);
}

// Returns null if there is no memory. Without asynchronous reads, each read is waited for.
Channel* new_channel_of(int64_t lanes, bool wait_for_each) {
    auto* channel = static_cast<Channel*>(calloc(1, sizeof(Channel)));
    if (channel == nullptr) return nullptr;
    channel->lane_count = lanes;
    channel->memory_bytes = lanes * LANE_BYTES;
    channel->memory = static_cast<char*>(aligned_alloc(PAGE, channel->memory_bytes));
    channel->lanes = static_cast<Lane*>(calloc(lanes, sizeof(Lane)));
    channel->idle = static_cast<Lane**>(calloc(lanes, sizeof(Lane*)));
    channel->batch = static_cast<Request**>(calloc(lanes, sizeof(Request*)));
    channel->answers = static_cast<Answer*>(calloc(lanes, sizeof(Answer)));
    if (channel->memory == nullptr || channel->lanes == nullptr || channel->idle == nullptr ||
        channel->batch == nullptr || channel->answers == nullptr) {
        free_channel(channel);
        return nullptr;
    }
    channel->has_context = !wait_for_each && setup(lanes, &channel->context) == 0;
    return channel;
}

int64_t new_channel(int64_t lanes, bool wait_for_each) {
    return reinterpret_cast<int64_t>(new_channel_of(lanes, wait_for_each));
}

int64_t is_asynchronous(const Channel* channel) { return channel->has_context ? 1 : 0; }

// Reads or writes, and waits. Returns the bytes, or -errno.
int64_t carry_out(const Request& request) {
    char* memory = reinterpret_cast<char*>(request.aio_buf);
    const int fd = static_cast<int>(request.aio_fildes);
    int64_t done;
    do {
        done = request.aio_lio_opcode == IOCB_CMD_PWRITE
                   ? pwrite(fd, memory, request.aio_nbytes, request.aio_offset)
                   : pread(fd, memory, request.aio_nbytes, request.aio_offset);
    } while (done < 0 && errno == EINTR);
    return done < 0 ? -errno : done;
}

// Rows in the order of their places, which are read stretch by stretch.
struct Rows {
    const Form& form;
    int64_t n;
    const int64_t* files;  // descriptors
    const int64_t* slots;
    int64_t* states;
    int64_t at = 0;

    int64_t block_of(int64_t i) const { return slots[i] / form.slots * form.block_bytes; }

    // Cuts the next stretch of rows.
    bool next(Lane& lane) {
        if (at >= n) return false;
        const int64_t start = block_of(at);
        int64_t end = start + form.block_bytes;
        lane.first = at++;
        for (; at < n && files[at] == files[lane.first]; ++at) {
            const int64_t block = block_of(at);
            const int64_t block_end = block + form.block_bytes;
            if (block < end - form.block_bytes || block > end + GAP_BYTES) break;
            if (block_end - start > LANE_BYTES && block_end > end) break;
            end = block_end;
        }
        lane.end = at;
        lane.request.aio_fildes = static_cast<uint32_t>(files[lane.first]);
        lane.request.aio_offset = start;
        lane.request.aio_nbytes = static_cast<uint64_t>(end - start);
        return true;
    }

    char* slot_in(const Lane& lane, int64_t i) const {
        return lane.memory + place_of(slots[i], form) - lane.request.aio_offset;
    }

    void set_states(const Lane& lane, int64_t state) {
        for (int64_t i = lane.first; i < lane.end; ++i) states[i] = state;
    }
};

struct Reading : Rows {
    int64_t table;
    const int64_t* ids;
    Cut cut;
    char* out;
    const int64_t* positions;

    // Copies the rows of a stretch that was read. Returns whether the stretch is to be written.
    bool finish(Lane& lane) {
        for (int64_t i = lane.first; i < lane.end; ++i) {
            const char* slot = slot_in(lane, i);
            states[i] = state_of(slot, table, ids[i], form);
            if (states[i] == FOUND) {
                memcpy(out + positions[i] * cut.bytes, slot + cut.from, cut.bytes);
            }
        }
        return false;
    }
};

struct Patching : Rows {
    const char* source;  // a whole slot for each row

    bool finish(Lane& lane) {
        for (int64_t i = lane.first; i < lane.end; ++i) {
            memcpy(slot_in(lane, i), source + i * form.slot_bytes, form.slot_bytes);
        }
        return true;
    }
};

template <typename Work>
class Flow {
  public:
    Flow(Channel& channel, Work& work) : channel_(channel), work_(work) {
        const int64_t each = greatest(LANE_BYTES, work.form.block_bytes);
        const int64_t lanes = channel.memory_bytes / each;
        for (; idle_ < lanes; ++idle_) {
            channel.lanes[idle_].memory = channel.memory + idle_ * each;
            channel.idle[idle_] = channel.lanes + idle_;
        }
    }

    void run() {
        for (;;) {
            while (!has_failed_ && idle_ > 0) {
                Lane& lane = *channel_.idle[idle_ - 1];
                if (!work_.next(lane)) break;
                --idle_;
                add(lane, IOCB_CMD_PREAD);
            }
            if (waiting_ > 0) send();
            if (in_flight_ > 0) {
                receive();
            } else if (waiting_ == 0) {
                return;
            }
        }
    }

  private:
    void add(Lane& lane, int opcode) {
        lane.request.aio_lio_opcode = static_cast<uint16_t>(opcode);
        lane.request.aio_buf = reinterpret_cast<uint64_t>(lane.memory);
        lane.request.aio_data = reinterpret_cast<uint64_t>(&lane);
        channel_.batch[waiting_++] = &lane.request;
    }

    // Gives the system as many of the waiting requests as it takes.
    void send() {
        const int64_t taken =
            channel_.has_context ? submit(channel_.context, waiting_, channel_.batch) : 0;
        if (taken > 0) {
            in_flight_ += taken;
            drop(taken);
        } else if (taken == 0 || errno != EAGAIN || in_flight_ == 0) {
            // The first request is carried out here, so its own error shows.
            Request& first = *channel_.batch[0];
            drop(1);
            end(first, carry_out(first));
        }  // else: again, once others are done
    }

    void drop(int64_t n) {
        waiting_ -= n;
        memmove(channel_.batch, channel_.batch + n, waiting_ * sizeof(Request*));
    }

    void receive() {
        // Several at once, because a call for each answer would cost more than the copying.
        const int64_t fewest = greatest<int64_t>(1, in_flight_ / 8);
        const int64_t n =
            answers(channel_.context, fewest, channel_.lane_count, channel_.answers);
        if (n < 0) return;  // EINTR
        in_flight_ -= n;
        for (int64_t i = 0; i < n; ++i) {
            Lane* lane = reinterpret_cast<Lane*>(channel_.answers[i].data);
            end(lane->request, channel_.answers[i].res);
        }
    }

    void end(Request& request, int64_t result) {
        Lane& lane = *reinterpret_cast<Lane*>(request.aio_data);
        const bool was_read = request.aio_lio_opcode == IOCB_CMD_PREAD;
        if (result != static_cast<int64_t>(request.aio_nbytes)) {
            work_.set_states(lane, result < 0 ? result : CUT_OFF);
            has_failed_ = true;
        } else if (!was_read) {
            work_.set_states(lane, FOUND);
        } else if (work_.finish(lane)) {
            add(lane, IOCB_CMD_PWRITE);
            return;
        }
        channel_.idle[idle_++] = &lane;
    }

    Channel& channel_;
    Work& work_;
    int64_t idle_ = 0;
    int64_t waiting_ = 0;
    int64_t in_flight_ = 0;
    bool has_failed_ = false;
};

// Reads n rows. Row i lies in slots[i] of files[i], and goes to out[positions[i]]. Writes the state
// of each row. After an error of the system no further rows are read.
void read_slots(
    Channel* channel, const Form* form, int64_t table, bool whole, int64_t n, const int64_t* files,
    const int64_t* slots, const int64_t* ids, char* out, const int64_t* positions, int64_t* states
) {
    for (int64_t i = 0; i < n; ++i) states[i] = NOT_READ;
    Reading work{{*form, n, files, slots, states}, table, ids, Cut(*form, whole), out, positions};
    Flow<Reading>(*channel, work).run();
}

// Replaces n slots. Blocks are read, changed and written. Slots and files must ascend.
void patch_slots(
    Channel* channel, const Form* form, int64_t n, const int64_t* files, const int64_t* slots,
    const char* source, int64_t* states
) {
    for (int64_t i = 0; i < n; ++i) states[i] = NOT_READ;
    Patching work{{*form, n, files, slots, states}, source};
    Flow<Patching>(*channel, work).run();
}

}  // namespace

extern const Operation row_blocks[] = {
    {"fill_slots_of_blocks", call<fill_slots_of_blocks>},
    {"take_slots", call<take_slots>},
    {"new_channel", call<new_channel>},
    {"free_channel", call<free_channel>},
    {"is_asynchronous", call<is_asynchronous>},
    {"read_slots", call<read_slots>},
    {"patch_slots", call<patch_slots>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET

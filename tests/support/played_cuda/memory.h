// Memory of the played card and pinned memory of the host.
#pragma once

#include <cstddef>

namespace played {

bool on_device(const void* address);
// Where those who play the card find what is at an address of the card, or of the host.
char* behind(const void* address);
// Whether the bytes are memory of the host that is pinned.
bool is_pinned(const void* address, size_t num_bytes = 1);

// An allocation of the card; null: there is no room. It has no contents yet: every byte is 0xff.
void* allocate(size_t num_bytes);
// False: nothing was allocated there.
bool release(void* address);
size_t total_bytes();
size_t used_bytes();

enum class Pinning { done, already, too_much, not_pinned };
Pinning pin(void* address, size_t num_bytes);
Pinning unpin(void* address);

}  // namespace played

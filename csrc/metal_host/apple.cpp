// The one file that holds metal-cpp's own definitions, on macOS.
#if defined(__APPLE__) && !defined(DS4_STANDIN)
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#endif
